"""The ranks that train one model together: named axes, and collectives on an axis."""

from octet.worker.mesh.axes import Axes, bound_exchange, make_axis, twin_of
from octet.worker.mesh.axis import Axis, Pending
from octet.worker.mesh.in_graph import AxisInBlocks
from octet.worker.mesh.mesh import Mesh
from octet.worker.mesh.pieces import Cut, TensorInPieces
from octet.worker.mesh.saved import SavedShards, SavedStates, SavedTensor
from octet.worker.mesh.waits import Waits

__all__ = [
    "Axes",
    "Axis",
    "AxisInBlocks",
    "Cut",
    "Mesh",
    "Pending",
    "SavedShards",
    "SavedStates",
    "SavedTensor",
    "TensorInPieces",
    "Waits",
    "bound_exchange",
    "make_axis",
    "twin_of",
]
