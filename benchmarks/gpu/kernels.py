"""Benchmark kernels on one GPU: quantization, AdamW, gradients and linear layers, each relative to its bound or its rivals.

    python -m benchmarks.gpu.kernels [--out FOLDER] [--sections quantize,adamw] [--smoke]

writes a dated table and `speedups.json`, which decides which layers stay in bf16. Every section stops when its share of
--budget-s is used up.
"""

from benchmarks.gpu.linear import linear_cases
from benchmarks.gpu.optimizer import optimizer_cases
from benchmarks.gpu.quantization import gradient_cases, quantize_cases
from benchmarks.gpu.report import Report
from benchmarks.gpu.session import Section, Session, parser, run
from benchmarks.gpu.speedups import speedup_cases


def sections(session: Session, _report: Report) -> list[Section]:
    """Return the sections in the order in which they run."""
    return [
        Section("Quantize", quantize_cases(session), share=0.17),
        Section("AdamW step", optimizer_cases(session), share=0.24),
        Section("Gradients in FP8", gradient_cases(session), share=0.04),
        Section("Linear layer, forward and backward", linear_cases(session), share=0.35),
        Section("Speedup by shape", speedup_cases(session), share=0.2),
    ]


def main() -> int:
    return run("kernels", "Kernels on one GPU", parser(__doc__).parse_args(), sections)


if __name__ == "__main__":
    raise SystemExit(main())
