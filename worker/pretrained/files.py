"""The tensors of a Hugging Face checkpoint folder, read one at a time, as values: FP8 weights times their scales."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from octet.api_schemas import ANY_FILE, Files, SpecConflict
from octet.worker.fp8.recipe import E4M3
from octet.worker.pretrained.compressed import SCALE_NAMES, decompress

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"


class PretrainedFiles:
    """A folder with `config.json` and `model.safetensors`, or several files that an index lists.

    Raises ValueError for a folder that is none, and for weights that are quantized in a way that `decompress` does not read.
    """

    def __init__(self, folder: Path, files: Files = ANY_FILE) -> None:
        """files: opens them. Raises SpecConflict for a path outside its folders."""
        self.folder = folder
        self._files = files
        self.config: dict[str, Any] = self._read_json(_CONFIG)
        self._file_of: dict[str, Path] = {}
        for path in self._paths():
            with self._opened(path) as file:
                self._file_of |= dict.fromkeys(file.keys(), path)
        self._check_quantization()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        with self._opened(self._file_of[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU: in the file's dtype, or, of FP8 codes, the fp32 values."""
        with self._opened(self._file_of[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.dtype != E4M3:
            return tensor
        module = name.removesuffix("weight")
        scale_name = next((module + scale for scale in SCALE_NAMES if module + scale in self), None)
        if scale_name is None:
            raise ValueError(
                f"{name} in {self.folder} is float8_e4m3fn without a scale; allowed: with {' or '.join(SCALE_NAMES)}."
            )
        return decompress(tensor, self.read(scale_name), name)

    def _paths(self) -> list[Path]:
        if (self.folder / _INDEX).exists():
            return [self.folder / name for name in sorted(set(self._read_json(_INDEX)["weight_map"].values()))]
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{self.folder} has no safetensors file; allowed: a folder with a Hugging Face checkpoint.")
        return paths

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(self._files.read(self.folder / name))
        except SpecConflict:
            raise
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.folder / name} cannot be read: {error}; allowed: a folder with a Hugging Face checkpoint."
            ) from error
        return document

    def _check_quantization(self) -> None:
        """Refuse integers and packed formats."""
        quantization = self.config.get("quantization_config")
        if quantization is None:
            return
        method, format = quantization.get("quant_method"), quantization.get("format", "float-quantized")
        is_known = method == "fp8" or (method == "compressed-tensors" and format in ("float-quantized", "naive-quantized"))
        if not is_known:
            raise ValueError(
                f"{self.folder} is quantized by {method!r} in format {format!r}; allowed: fp8, or compressed-tensors in "
                "float-quantized. Dequantize the checkpoint first."
            )

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        try:
            with ExitStack() as stack:
                if self._files.roots is not None:
                    # The link leads to the file that was opened and checked, whatever its path leads to by now.
                    path = Path(f"/proc/self/fd/{stack.enter_context(self._files.open(path)).fileno()}")
                yield stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}. Download it again.") from error
