"""The ranks that train one model together: named axes, and collectives on an axis."""

from worker.mesh.axis import Axis
from worker.mesh.cut import Cut
from worker.mesh.groups import make_axis
from worker.mesh.in_graph import AxisInBlocks
from worker.mesh.mesh import Mesh
from worker.mesh.pending import Pending
from worker.mesh.pieces import SavedShards, TensorInPieces
from worker.mesh.saved import SavedStates, SavedTensor
from worker.mesh.shares import sum_shares
from worker.mesh.twin import twin_of
from worker.mesh.waits import Waits

__all__ = [
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
    "make_axis",
    "sum_shares",
    "twin_of",
]
