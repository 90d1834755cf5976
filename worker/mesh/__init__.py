"""The ranks that train one model together: named axes, collectives on an axis, and FP8 codes averaged over an axis."""

from worker.mesh.axis import Axis
from worker.mesh.codes import average_codes
from worker.mesh.mesh import Mesh

__all__ = ["Axis", "Mesh", "average_codes"]
