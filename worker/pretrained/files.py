"""The tensors of a Hugging Face checkpoint folder, read one at a time, as values: FP8 weights times their scales."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octet.api_schemas import ANY_FILE, Files, SpecConflict
from octet.api_schemas.models.weight_files import find_scales, is_of_server, read_headers
from octet.worker.pretrained.compressed import decompress, is_power_of_two

_CONFIG = "config.json"


class PretrainedFiles:
    """A folder with `config.json` and `model.safetensors`, or several files that an index lists.

    Raises ValueError for a folder that is none, and SpecConflict, a ValueError, for weights that are quantized in a way that
    `weight_files.py` does not describe.
    """

    def __init__(self, folder: Path, files: Files = ANY_FILE) -> None:
        """files: opens them. Raises SpecConflict for a path outside its folders."""
        self.folder = folder
        self._files = files
        self.config: dict[str, Any] = self._read_json(_CONFIG)
        self._stored = read_headers(folder, files)
        self._scales = find_scales(self.config, self._stored)
        scales = {scale.name for scale in self._scales.values()}
        self.names = [name for name in self._stored if name not in scales and not is_of_server(name)]
        """The names of all tensors of the model. Scales of FP8 weights belong to their weights."""
        self._names = frozenset(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._stored[name].shape

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor on the CPU: in the file's dtype, or, of FP8 codes, the fp32 values. index: of a matrix in a stack."""
        tensor = self._tensor(name, index)
        if (scale := self._scales.get(name)) is None:
            return tensor
        scales = self._tensor(scale.name, index)
        if tensor.dim() == 2:
            return decompress(tensor, scales, scale.strategy)
        return torch.stack([decompress(*each, scale.strategy) for each in zip(tensor, scales, strict=True)])

    def dequant_scale(self, name: str, index: int | None = None) -> Tensor | None:
        """Return the scale, fp32 (), of FP8 codes that are of the kind that levels hold: one scale, a power of two.

        index: of a matrix in a stack. None for other tensors.
        """
        scale = self._scales.get(name)
        if scale is None or prod(self._stored[scale.name].shape[0 if index is None else 1 :]) != 1:
            return None
        found = self._tensor(scale.name, index).to(torch.float32).reshape(())
        return found if is_power_of_two(found) else None

    def read_of_server(self, name: str) -> Tensor:
        """Return a tensor that only servers use, such as the scale of a layer's inputs. Raises ValueError without one."""
        if name not in self._stored:
            raise ValueError(f"{self.folder} has no tensor {name}. Export it again.")
        return self._tensor(name)

    def _tensor(self, name: str, index: int | None = None) -> Tensor:
        with self._opened(self._stored[name].path) as file:
            tensor: Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        return tensor

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
