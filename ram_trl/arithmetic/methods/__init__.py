"""The merge methods, a file and a row each. docs/METHODS.md compares them and says how to add one."""

from .average import AVERAGE
from .dare import DARE
from .dare_ties import DARE_TIES
from .fisher import FISHER
from .interpolation import INTERPOLATION
from .isolate import ISOLATE
from .method import Method
from .reinforced import RAM, RAM_PLUS, RAM_PLUS_SOFT
from .resmerge import RESMERGE
from .task_arithmetic import TASK_ARITHMETIC
from .ties import TIES
from .wudi import WUDI


__all__ = ["METHODS"]

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        RAM_PLUS,
        RAM,
        RAM_PLUS_SOFT,
        AVERAGE,
        TASK_ARITHMETIC,
        TIES,
        DARE,
        DARE_TIES,
        FISHER,
        WUDI,
        RESMERGE,
        INTERPOLATION,
        ISOLATE,
    )
}
