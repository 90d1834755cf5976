"""The ranks that train one model together: named axes, and collectives on an axis."""

from worker.mesh.axis import Axis, Pending
from worker.mesh.mesh import Mesh

__all__ = ["Axis", "Mesh", "Pending"]
