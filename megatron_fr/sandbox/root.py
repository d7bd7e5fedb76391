"""The sandbox's root folder and the ``bwrap`` command that makes it."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_fr.errors import ToolError

INSIDE = Path(__file__).with_name("inside")
PACKAGES, INSIDE_ROOT, SCRATCH = "/packages", "/sandbox", "/scratch"
#: Imported once, before the first call; found in ``/packages`` with what they need.
PREIMPORT = ("numpy", "sympy")
_BESIDE = ("numpy.libs", "mpmath")
#: Runs the calls when the run is root's; owns nothing.
UNUSED_UID = 61184
_CAP_SYS_ADMIN = 21
REMEDY = "or write agent.tool.sandbox=none to run the tool without any of its protection"


def find_bwrap() -> str:
    """The program, from the environment or PATH; ToolError with the remedy where there is none."""
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    if (found := shutil.which("bwrap", path=path)) is None:
        raise ToolError(f"the Python tool needs bwrap: run launch/env.sh or install the package bubblewrap, {REMEDY}")
    return found


def command(read_only_paths: Sequence[Path], channel: int) -> list[str]:
    """The command line that starts the warm interpreter in a root of its own, with ``channel`` as its socket."""
    interpreter = os.path.realpath(sys.executable)
    binds = dict(_binds(interpreter)) | {str(path): str(path) for path in read_only_paths if path.exists()}
    folders = {SCRATCH, "/dev/shm", "/proc"}
    for target in binds:
        folders |= {str(parent) for parent in Path(target).parents}
    arguments = [find_bwrap(), "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"]
    # Root without a user namespace: the interpreter may lie in a folder that only root may enter.
    arguments += (
        "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try "
        "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID"
        if is_root()
        else "--unshare-all --cap-drop ALL"
    ).split()
    for folder in sorted(folders - {"/"}):  # made before, as the parents of a bind are closed to other users
        arguments += ["--dir", folder]
    for target in sorted(binds):
        arguments += ["--ro-bind", os.path.realpath(binds[target]), target]
    for device in ("null", "zero", "random", "urandom"):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    arguments += ["--proc", "/proc", "--remount-ro", "/", "--chdir", "/", "--"]
    return [*arguments, interpreter, "-I", "-S", INSIDE_ROOT, str(channel)]


def is_root() -> bool:
    """Whether this process may make namespaces as root, so that calls get a user id of their own."""
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    return os.geteuid() == 0 and bool(int(effective.split()[1], 16) >> _CAP_SYS_ADMIN & 1)


def package_folders() -> list[str]:
    """Where this process finds the packages that the tool offers."""
    found = (find_spec(name) for name in PREIMPORT)
    return list(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin))


def _binds(interpreter: str) -> Iterator[tuple[str, str]]:
    """``(place inside, source)`` of the interpreter, its libraries and the packages."""
    yield interpreter, interpreter
    library = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})
    yield library, library
    yield INSIDE_ROOT, str(INSIDE)
    for shared in Path(sys.base_prefix, "lib").glob("libpython3*.so*"):
        yield str(shared), str(shared)
    folders = ["/lib64", "/usr/lib64"]
    if multiarch := sysconfig.get_config_var("MULTIARCH"):  # of Debian; elsewhere lib64 has all libraries
        folders += [f"/lib/{multiarch}", f"/usr/lib/{multiarch}"]
    yield from ((folder, folder) for folder in folders if os.path.isdir(folder))
    for folder in package_folders():
        for name in (*PREIMPORT, *_BESIDE):
            if (package := Path(folder, name)).exists():
                yield f"{PACKAGES}/{name}", str(package)
