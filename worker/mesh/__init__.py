"""The ranks that train one model together: named axes, and collectives on an axis."""

from worker.mesh.axis import Axis
from worker.mesh.mesh import Mesh
from worker.mesh.pending import Pending
from worker.mesh.pieces import TensorInPieces
from worker.mesh.twin import twin_of
from worker.mesh.waits import Waits

__all__ = ["Axis", "Mesh", "Pending", "TensorInPieces", "Waits", "twin_of"]
