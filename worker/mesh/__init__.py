"""The ranks that train one model together: named axes, and collectives on an axis."""

from worker.mesh.axis import Axis
from worker.mesh.mesh import Mesh
from worker.mesh.pending import Pending
from worker.mesh.pieces import TensorInPieces
from worker.mesh.twin import twin_of

__all__ = ["Axis", "Mesh", "Pending", "TensorInPieces", "twin_of"]
