"""Compile every kernel of `worker/kernels/cuda` for a compute capability, 9.0 if none is named, without a GPU.

Triton's interpreter checks no types and knows no device's instructions; the compiler does. The arguments are those of a bf16
matrix whose sizes and strides are multiples of 16, as in training. Run as a program, it prints what `test_compiles.py`
checks for each kernel: how many loads and stores are 16 bytes wide, instructions to avoid, and resources. With
`--spread` it compiles each kind once, and the update of each weight with the states of one level, instead of all.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octet.api_schemas.levels import LEVELS
from octet.worker.kernels.activations import ACTIVATIONS
from octet.worker.kernels.cuda import (
    amax,
    gates,
    gemm,
    gradient_norms,
    gradients,
    grouped,
    known_scale,
    measurement,
    mx,
    normalization,
    optimizer,
    quantization,
    rescale,
    transpose,
)
from octet.worker.optim import OPTIMIZERS
from octet.worker.optim.rules.rule import Rule

TYPES = {  # argument types by name, equal in all kernels
    "x": "*bf16", "out": "*fp32", "unless": "*i1", "bits": "*i16", "codes": "*u8", "codes_t": "*u8", "scales": "*fp32",
    "amax": "*fp32", "row_amax": "*fp32", "column_amax": "*fp32", "new_amax": "*fp32", "by_row": "*i32", "by_column": "*i32",
    "own_amax": "*fp32", "uses_amax": "*i1", "gated_codes": "*u8", "gated_amax": "*fp32", "gated_uses_amax": "*i1",
    "dequant_scale": "*fp32", "row_scale": "*fp32", "column_scale": "*fp32", "stride": "i32", "num_elements": "i32",
    "num_rows": "i32", "num_columns": "i32", "row_scale_stride_m": "i32", "row_scale_stride_n": "i32",
    "column_scale_stride_n": "i32", "column_scale_stride_m": "i32", "scale_stride_m": "i32", "scale_stride_n": "i32",
    "b": "*fp8e4nv", "a_scale": "*fp32", "b_scale": "*fp32", "num_summed": "i32",
    "code_stride": "i32", "stored_scale": "*fp32", "row_step": "i32",
    "a_scale_stride_m": "i32", "a_scale_stride_k": "i32", "b_scale_stride_n": "i32", "b_scale_stride_k": "i32",
}  # fmt: skip
FP8 = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
CAPABILITIES = (89, 90, 100, 120)  # times ten: Ada, Hopper, two Blackwells
NO_CODES = {"FORMAT": None, "MARGIN": 0, "codes": None, "amax": None, "uses_amax": None}
NO_GRADIENT_CODES = (
    NO_CODES
    | {"GATED_FORMAT": None, "GATED_MARGIN": 0, "gated_out": None}
    | {f"gated_{name}": None for name in ("codes", "amax", "uses_amax")}
)
UNALIGNED = {
    "uses_amax",
    "gated_uses_amax",
    "unless",
    "seed",
    "step",
    "stream",
    "alpha",
    "low",
    "high",
    "row_step",
    "num_parts",
}


def kernels(*, spread: bool = False) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield (name, kernel, constants) of each kernel. A constant of None is a pointer that is not passed.

    spread: fewer combinations, each kind and format all the same. Tiles with one scale are quantized for rows, for columns and
    for both, with other scales for both; each format is multiplied with one kind; each weight has the codecs of one level.
    """
    tile = {"FORMAT": "e4m3", "ACTIVATION": None, "MARGIN": 0, "TILE_M": 128, "TILE_N": 128}
    for kind in ("tensor", "row", "narrow", "square"):
        given = {} if kind in ("tensor", "row") else {"row_amax": None, "column_amax": None}
        sides = ((True, True), (True, False), (False, True))
        for rows, columns in sides[:1] if spread and kind != "tensor" else sides:
            tracked = {"TRACKS_AMAX": True} if kind == "tensor" else {"TRACKS_AMAX": False, "new_amax": None}
            unit = {"HAS_STORED_SCALE": True} if kind == "tensor" else {"HAS_STORED_SCALE": False, "stored_scale": None}
            constants = {**tile, **given, **tracked, **unit, "KIND": kind, "ROWS": rows, "COLUMNS": columns}
            yield f"quantize_tile {kind} {rows} {columns}", quantization._quantize_tile, constants
    constants = {**tile, "ROWS": True, "COLUMNS": True, "BLOCK": 32}
    yield "quantize_tile mx", mx.quantize_tile, constants
    for name in ("e4m3", "e5m2", "fp16"):
        flat = {"FORMAT": name, "ACTIVATION": None, "MARGIN": 0, "HAS_STORED_SCALE": True, "MARKS_NONFINITE": name == "e4m3"}
        flat |= {"TRACKS_AMAX": True, "BLOCK": 8192}
        yield f"encode_flat {name}", quantization._encode_flat, flat
    rows = {"FORMAT": "e5m2", "ACTIVATION": None, "MARGIN": 0, "ROWS": 2, "COLUMNS": 4096}
    yield "quantize_rows", quantization._quantize_rows, {**rows, "FITS": True}
    yield "quantize_rows, long", quantization._quantize_rows, {**rows, "FITS": False}
    yield "amax_flat", amax._amax_flat, {"HAS_UNLESS": True, "ACTIVATION": None, "BLOCK": 8192, "NUM_BLOCKS": 4}
    yield "amax_rows", amax._amax_rows, {"ROWS": 2, "COLUMNS": 4096}
    yield "amax_tiles", amax._amax_tiles, {"IS_SQUARE": True, "ROWS": 128, "COLUMNS": 128}
    yield "amax_both", amax._amax_both, {"ACTIVATION": None, "ROWS": 128, "COLUMNS": 128}
    yield "clear_unless_finite", amax._clear_unless_finite, {"SIGNLESS": 0x7FFF, "LIMIT": 0x7F80, "BLOCK": 8192}
    yield from activation_kernels(spread=spread)
    yield from norm_kernels(spread=spread)
    scaled = {"SCALE_ROWS": 1, "SCALE_COLUMNS": 128, "TILE_M": 64, "TILE_N": 128}
    yield "encode", rescale._rescale_tile, {**scaled, "IN_FORMAT": "values", "OUT_FORMAT": "e5m2"}
    yield "dequantize", rescale._rescale_tile, {**scaled, "IN_FORMAT": "e4m3", "OUT_FORMAT": "values"}
    yield "decode_split", rescale._decode_split, {"BLOCK": rescale.TILE}
    sample = {"column_stride": 1, "code_column_stride": 1, "SCALE_ROWS": 1, "SCALE_COLUMNS": 128, "ROWS": 4, "COLUMNS": 1024}
    for name, limit in (("e4m3", 448.0),) if spread else (("e4m3", 448.0), ("e5m2", 57344.0)):
        yield (
            f"measure {name}",
            measurement._measure_sample,
            {**sample, "FORMAT": name, "LIMIT": limit, "HAS_STORED_SCALE": True},
        )
    product = {"TILE_M": 128, "TILE_N": 128, "TILE_K": 128, "TILE_GROUP": 8, "A_SCALE_ROWS": 1, "B_SCALE_ROWS": 128}
    for name in ("e4m3", "e5m2"):
        for is_blockwise in (name == "e4m3",) if spread else (True, False):
            constants = {**product, "A_FORMAT": name, "B_FORMAT": "e4m3", "IS_BLOCKWISE": is_blockwise}
            yield f"matmul {name} {is_blockwise}", gemm._matmul, constants
    narrow = {**product, "A_FORMAT": "e4m3", "B_FORMAT": "e4m3", "IS_BLOCKWISE": True, "TILE_K": 32, "B_SCALE_ROWS": 1}
    yield "matmul of narrow blocks", gemm._matmul, narrow
    yield from grouped_kernels(spread=spread)
    yield "transpose", transpose._transpose, {"TILE_M": 128, "TILE_N": 128}
    yield from optimizer_kernels(spread=spread)
    yield from gradient_kernels(spread=spread)


def grouped_kernels(*, spread: bool = False) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The kernels of runs of 128 experts, and of their weights by a table. spread: weights of FP16 codes alone."""
    tile = {"TILE_M": 128, "TILE_N": 128, "ALIGNED": True}
    runs, weights = ({**tile, "HAS_RUNS": has_runs, "IN_TABLE": not has_runs} for has_runs in (True, False))
    runs |= {"table": None, "RUNS": 128}
    weights |= {"counts": None, "RUNS": 16}
    yield "amax of runs", grouped.amax_kernel, runs
    code = {"FORMAT": "e4m3", "MARGIN": 0, "HAS_STORED_SCALE": False, "MARKS_NONFINITE": False, "SCALE_STRIDE": 1}
    yield "quantize_runs", grouped.quantize_kernel, {**runs, **code, "ROWS": True, "COLUMNS": True}
    stored = {**weights, **code, "HAS_STORED_SCALE": True, "amax": None}
    yield "quantize_runs, weights", grouped.quantize_kernel, {**stored, "ROWS": True, "COLUMNS": False, "codes_t": None}
    yield "quantize_runs, weights turned", grouped.quantize_kernel, {**stored, "ROWS": False, "COLUMNS": True, "codes": None}
    product = {**tile, "TILE_K": 128, "A_FORMAT": "e5m2", "B_FORMAT": "e4m3", "RUNS": 128}
    one = {**product, "A_FORMAT": "e4m3", "SUMS_RUNS": False, "IN_TABLE": False, "table": None, "amax": None}
    yield "matmul of runs", grouped.matmul_kernel, one
    yield "matmul over runs", grouped.matmul_kernel, {**product, "SUMS_RUNS": True, "IN_TABLE": False, "table": None}
    if not spread:
        yield "amax of weights", grouped.amax_kernel, weights
        codes = {**weights, **code, "FORMAT": None, "amax": None, "scales": None, "codes": None, "ROWS": False, "COLUMNS": True}
        yield "transpose weights", grouped.quantize_kernel, codes
        held = {**product, "A_FORMAT": "e4m3", "SUMS_RUNS": False, "IN_TABLE": True, "b_scales": None, "amax": None}
        yield "matmul of runs, weights in a table", grouped.matmul_kernel, held
    yield "sum of runs", grouped.sum_kernel, {"RUNS": 128, "ROWS": grouped.ROWS_OF_SUM, "TILE_N": 128}


def gradient_kernels(*, spread: bool = False) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Norms of gradients by order 2, infinity and others, clipping, and what works on gradients in codes. spread: order 2."""
    table = {"ALIGNED": True, "CHUNK": gradient_norms.CHUNK}
    for order in (2,) if spread else (2, "inf", 3.0):
        sums = {"ORDER": order, "SUMS": gradient_norms.SUMS}
        yield f"norm of parts, {order}", gradient_norms.norm_parts_kernel, {**table, "ORDER": order}
        yield f"norm, {order}", gradient_norms.norms_kernel, sums
        yield f"norm, total, {order}", gradient_norms.total_norm_kernel, sums
    yield "clip", gradient_norms.clip_kernel, table
    chunk = {"CHUNK": gradients.CHUNK}
    yield "accumulated_amax", gradients.accumulated_amax_kernel, chunk
    yield "accumulate", gradients.accumulate_kernel, chunk
    yield "clamped_amax", gradients.clamped_amax_kernel, chunk
    yield "clamp", gradients.clamp_kernel, chunk
    yield "mean_of_shards", gradients.mean_of_shards_kernel, {**chunk, "NUM_RANKS": 8}


def activation_kernels(*, spread: bool = False) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The kernels that apply an activation as they read. spread: one of the activations that need exp or erf for each."""
    known = [name for name in ACTIVATIONS if name != "relu"]
    options = {"FORMAT": "e4m3", "MARGIN": 0}
    for name in known[:1] if spread else known:
        flat = {
            **options,
            "stored_scale": None,
            "HAS_STORED_SCALE": False,
            "MARKS_NONFINITE": False,
            "TRACKS_AMAX": True,
            "BLOCK": 8192,
        }
        yield f"encode_flat {name}", quantization._encode_flat, {**flat, "ACTIVATION": name}
        block, num_blocks = amax.flat_blocks(name)
        found = {"HAS_UNLESS": True, "ACTIVATION": name, "BLOCK": block, "NUM_BLOCKS": num_blocks}
        yield f"amax_flat {name}", amax._amax_flat, found
    for name in known[:1] if spread else known:
        tile = {
            **options,
            "TILE_M": 128,
            "TILE_N": 128,
            "KIND": "tensor",
            "ROWS": False,
            "COLUMNS": True,
            "TRACKS_AMAX": True,
        }
        tile |= {"stored_scale": None, "HAS_STORED_SCALE": False}
        yield f"quantize_tile {name}", quantization._quantize_tile, {**tile, "ACTIVATION": name}
        blocks = {"ROWS": True, "TRACKS_AMAX": False, **dict.fromkeys(("new_amax", "row_amax", "column_amax"))}
        for kind in ("narrow",) if spread else ("narrow", "square"):
            constants = {**tile, **blocks, "KIND": kind, "ACTIVATION": name}
            yield f"quantize_tile {name} {kind}", quantization._quantize_tile, constants
        rows = {**options, "ROWS": 2, "COLUMNS": 4096, "FITS": True}
        yield f"quantize_rows {name}", quantization._quantize_rows, {**rows, "ACTIVATION": name}
    for name in known[1:] if spread else known:
        is_gate = name == "silu"
        gate = {"ACTIVATION": name, "HAS_GATED": is_gate, "BLOCK": gates.BLOCK, **({} if is_gate else {"gated": None})}
        codes = {"FORMAT": "e4m3", "MARGIN": 0} if is_gate else NO_CODES
        yield f"activate {name}", gates.activate_kernel, {**gate, **codes}
        backward = {"FORMAT": "e5m2", "MARGIN": 0, "GATED_FORMAT": "e5m2", "GATED_MARGIN": 0} if is_gate else NO_GRADIENT_CODES
        yield f"activate_backward {name}", gates.activate_backward_kernel, {**gate, **backward, "STRIDE": gates.AMAX_STRIDE}
    for name, has_columns in (("e4m3", True), ("e5m2", False)):
        tile = {"FORMAT": name, "MARGIN": 0, "COLUMNS": has_columns, "TILE_M": 128, "TILE_N": 128}
        yield f"complete {name}", known_scale.complete_kernel, tile if has_columns else {**tile, "codes_t": None}


def norm_kernels(*, spread: bool = False) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Both norms of rows of 4096. spread: one of them."""
    sizes = {"EPS_BITS": 0x3727C5AC, "HAS_WEIGHT": True, "ROWS": 2, "COLUMNS": 4096}
    layer_norm = {**sizes, "IS_LAYER_NORM": True, "HAS_BIAS": True, "FORMAT": "e4m3", "MARGIN": 0}
    yield "layer norm", normalization.normalize_kernel, layer_norm
    if not spread:
        rms_norm = {**sizes, "IS_LAYER_NORM": False, "HAS_BIAS": False, "bias": None, "mean": None, **NO_CODES}
        yield "RMS norm", normalization.normalize_kernel, rms_norm


def optimizer_kernels(*, spread: bool = False) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Adam with each weight and the codecs of each level; every other rule, by its name, with each weight once.

    spread: every second weight, the others by the next rule. Then O2 is the level with both its own weight and codecs. A rule
    that combines others, as Muon's, has no kernels of its own.
    """
    options = {"L2": False, "ALIGNED": True, "NUM_BLOCKS": optimizer.NUM_BLOCKS, "NUM_TURNS": optimizer.NUM_TURNS}
    for turn, rule in enumerate(known.rule for known in OPTIMIZERS if type(known.rule).of is Rule.of):
        codecs = {" ".join(getattr(level, state) for state in rule.state_codecs): None for level in LEVELS.values()}
        label = "" if rule.name == "adam" else f"{rule.name} "
        for number, weight in enumerate(("fp32", "bf16", "fp16", "fp16-scaled", "split", "master")):
            if spread and (number + turn + 1) % 2:
                continue
            gradient = "fp32" if weight in ("fp32", "bf16", "fp16") else "fp8"
            formats = {"RULE": rule.name, "WEIGHT": weight, "GRADIENT": gradient}
            yield f"prepare {label}{weight}", optimizer.prepare_kernel, formats
            is_whole = rule.name == "adam" and not spread
            for states in codecs if is_whole else [[*codecs][(number + 1) % len(codecs)]]:
                yield f"update {label}{weight} {states}", optimizer.update_kernel, {**formats, "STATES": states, **options}


def types_of(name: str) -> dict[str, str]:
    changed = {
        "dequantize": {"x": "*u8", "out": "*bf16"},
        "encode": {"out": "*u8"},
        "decode_split": {"codes": "*u8", "residual": "*i8", "out": "*bf16"},
        "encode_flat fp16": {"codes": "*fp16"},
        "clear_unless_finite": {"out": "*u8"},
        "transpose": {"out": "*u8"},
        "layer norm": {"weight": "*fp32", "bias": "*fp32", "rstd": "*fp32"},
        "RMS norm": {"weight": "*fp32", "rstd": "*fp32", "out": "*bf16"},
        **{f"matmul {a} {blocks}": {"a": pointer, "out": "*bf16"} for a, pointer in FP8.items() for blocks in (True, False)},
        "matmul of narrow blocks": {"a": FP8["e4m3"], "out": "*bf16"},
        "matmul of runs": {"a": FP8["e4m3"], "out": "*bf16"},
        "matmul of runs, weights in a table": {"a": FP8["e4m3"], "out": "*bf16"},
        "matmul over runs": {"a": FP8["e5m2"], "out": "*bf16"},
        "quantize_runs, weights": {"x": "*fp16"},
        "quantize_runs, weights turned": {"x": "*fp16"},
        "transpose weights": {"x": "*u8"},
    }
    tables = {"table": "*i64", "groups": "*fp64", "constants": "*fp32", "finite": "*u8", "chunks": "*i32"}
    of_norms = {
        "parts": "*fp32",
        "norm": "*fp32",
        "again": "*fp32",
        "total": "*fp32",
        "num_quads": "i32",
        "max_norm_bits": "i32",
    }
    counted = {"seed": "i64", "step": "i64", "stream": "i64", "stride": "i64", "count": "*i64"}
    of_runs = {
        "counts": "*i32",
        "a_scales": "*fp32",
        "b_scales": "*fp32",
        "num_matrices": "i32",
        "num_runs": "i32",
        "stride_t": "i32",
    }
    if name.startswith("activate"):
        return {**TYPES, **dict.fromkeys(("grad", "gated", "out", "gated_out"), "*bf16"), "amaxes": "*fp32"}
    if name in ("accumulated_amax", "accumulate", "clamped_amax", "clamp"):
        given = {"alpha": "fp32", "other": "*bf16", "new_scale": "*fp32", "low": "fp32", "high": "fp32", "is_changed": "*i32"}
        return {**TYPES, **counted, **given}
    return {**TYPES, **tables, **counted, "mean": "*fp32", **of_norms, **of_runs, **changed.get(name, {})}


def num_warps(name: str) -> int:
    if name.startswith("update"):
        return optimizer.NUM_WARPS
    if name.startswith("measure"):
        return measurement.WARPS
    if re.match("quantize_tile gelu(?!-)", name):
        return quantization.ERF_TILE_WARPS
    return 4 if name in ("sum of runs", "accumulated_amax", "accumulate", "clamped_amax", "clamp", "mean_of_shards") else 8


def compile_kernel(name: str, kernel: Any, constants: dict[str, Any], capability: int = 90) -> Any:
    """Compile a kernel with Triton. The `asm` of the result has the PTX and the cubin. capability: one of CAPABILITIES."""
    types = types_of(name)
    arguments = kernel.arg_names
    signature = {argument: "constexpr" if argument in constants else types[argument] for argument in arguments}
    constexprs = {(arguments.index(argument),): value for argument, value in constants.items()}
    unspecialized = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    unaligned = UNALIGNED | unspecialized | {argument for argument in arguments if "_stride_" in argument} | set(constants)
    aligned = [argument for argument in arguments if argument not in unaligned]
    attributes = {(arguments.index(argument),): [["tt.divisibility", 16]] for argument in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": num_warps(name), "enable_fp_fusion": False}
    if kernel in (quantization._quantize_tile, grouped.quantize_kernel):
        options["maxnreg"] = quantization.TILE_REGISTERS
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def accesses(ptx: str) -> dict[str, int]:
    """Count the instructions in PTX that decide a kernel's speed."""
    return {
        "loads": len(re.findall(r"ld\.global", ptx)),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg", ptx)),
        "saturating_casts": len(re.findall(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32", ptx)),
        "other_casts": len(re.findall(r"cvt\.(?!rn\.satfinite\.e[45]m[23]x2\.f32)\S*e[45]m[23]x2\.f", ptx)),
        "exchanges": len(re.findall(r"(?:ld|st)\.shared|bar\.sync|barrier", ptx)),
        "slow_ways": len(re.findall(r"(?:div|sqrt)\.rn\.f32", ptx)),
        "stores": len(re.findall(r"st\.global", ptx)),
        "wide_stores": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
    }


def resources(kernel: Any) -> dict[str, int]:
    """Return what a thread has in registers and on its stack, where spills go, and a program's bytes of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        program = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", printed)
    return {"registers": int(registers), "stack": int(stack), "shared": kernel.metadata.shared}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spread", action="store_true", help="update each weight with the states of one level")
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, default=90, help="ten times the compute capability")
    parsed = parser.parse_args()
    compiled = {}
    for name, kernel, constants in kernels(spread=parsed.spread):
        made = compile_kernel(name, kernel, constants, parsed.capability)
        compiled[name] = accesses(made.asm["ptx"]) | resources(made) | {"threads": 32 * num_warps(name)}
    json.dump({"triton": triton.__version__, "kernels": compiled}, sys.stdout)
