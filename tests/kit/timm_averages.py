"""timm's averages of models, from the file of the installed package.

`import timm` loads torchvision, which has no build for the torch of these tests. The file itself needs torch alone.
"""

import importlib.util
from functools import cache
from importlib.metadata import distribution
from types import ModuleType


@cache
def model_ema() -> ModuleType:
    """Return `timm.utils.model_ema`."""
    path = distribution("timm").locate_file("timm/utils/model_ema.py")
    spec = importlib.util.spec_from_file_location("timm.utils.model_ema", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
