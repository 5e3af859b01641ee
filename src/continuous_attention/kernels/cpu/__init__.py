"""The CPU kernels in C++: which variants are built, which this machine can run, and which one is used.

One source is compiled for several processors, each into an extension module of its own; the best one that is built
and that the processor can run is chosen once, at import. Nothing here needs torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

VARIANTS = ("amx", "avx512", "avx2", "portable")  # the best first
REINSTALL = "install a C++ compiler (GCC or Clang) and reinstall continuous-attention from source"

built = tuple(name for name in VARIANTS if find_spec(f"{__name__}._{name}"))
runnable: tuple[str, ...] = ()  # of those built, the ones that this machine can run
chosen: str | None = None  # the one in use
module: ModuleType | None = None  # its functions forward and backward; ops.py calls them
reason = ""  # why there is none


def _load(name: str) -> ModuleType:
    return import_module(f"{__name__}._{name}")


def _reason() -> str:
    """Why nothing was built: the build left a note."""
    for folder in __path__:
        note = Path(folder, "not_built.txt")
        if note.exists():
            return note.read_text(encoding="utf-8").strip()
    return "they weren't built when it was installed"


@contextmanager
def use_variant(name: str) -> Iterator[None]:
    """Use another variant inside a with block, in all threads: for tests and measurements.

    Raises:
        ValueError: it isn't built, or this machine can't run it.
    """
    global chosen, module
    if name not in runnable:
        raise ValueError(f"the variant must be one of {', '.join(runnable) or '(none is built)'}, got {name!r}")
    before = chosen, module
    chosen, module = name, _load(name)
    try:
        yield
    finally:
        chosen, module = before


if "portable" in built:
    here = _load("portable").runnable()
    runnable = tuple(name for name in built if name in here)
    chosen = runnable[0]
    module = _load(chosen)
else:
    reason = _reason()
