"""The sandbox against code that misbehaves; every case runs for real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from megatron_fr.agents.forkserver import ForkServer
from megatron_fr.agents.sandbox_results import LOST, CodeResult
from megatron_fr.config import ToolLimits
from megatron_fr.errors import ToolError

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ToolLimits(timeout_s=20, memory_mb=256, output_chars=2000)
SHORT = ToolLimits(timeout_s=1, memory_mb=256, output_chars=2000)


def sandboxed[T](work: Callable[[ForkServer], Awaitable[T]]) -> T:
    async def main() -> T:
        server = ForkServer(isolate=True, require_network_isolation=True)
        await server.start()
        try:
            return await work(server)
        finally:
            await server.stop()

    return asyncio.run(main())


def run(code: str, limits: ToolLimits = LIMITS) -> CodeResult:
    return sandboxed(lambda server: server.run_code(textwrap.dedent(code), limits))


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.02)


def test_code_that_works_gives_its_output_and_no_error() -> None:
    result = run("print(37 * 48)")
    assert (result.output, result.error, result.timed_out) == ("1776\n", None, False)


def test_an_exception_gives_the_users_traceback_and_its_last_line() -> None:
    result = run("print(5)\ndef f():\n    return 1 / 0\nf()")
    assert result.error == "ZeroDivisionError: division by zero"
    lines = result.output.splitlines()
    assert lines[:2] == ["5", "Traceback (most recent call last):"]
    assert '  File "<tool>", line 3, in f' in lines
    assert "    return 1 / 0" in lines
    assert "jobs.py" not in result.output


def test_an_infinite_loop_is_ended_at_its_time_limit_and_keeps_what_it_printed() -> None:
    started = time.monotonic()
    result = run("print('before')\nwhile True: pass", SHORT)
    assert result.timed_out
    assert result.output == "before\n"
    assert result.error is not None
    assert result.error.startswith("TimeoutError")
    assert 1 <= time.monotonic() - started < 15


def test_a_sleeping_call_is_ended_at_its_time_limit() -> None:
    assert run("import time; time.sleep(60)", SHORT).timed_out


def test_allocating_a_gigabyte_is_a_memory_error() -> None:
    assert run("x = bytearray(1 << 30)").error == "MemoryError"


def test_a_hundred_megabytes_of_output_are_cut_with_a_note_and_keep_both_ends() -> None:
    result = run("print('start')\nline = 'y' * 1_000_000\nfor _ in range(100): print(line)\nprint('end')")
    assert result.error is None
    assert result.output.startswith("start\nyyyy")
    assert result.output.endswith("yyyy\nend\n")
    assert "characters of output cut" in result.output
    assert len(result.output) < 2100


def test_a_failure_after_long_output_still_names_its_error() -> None:
    result = run("print('y' * 1_000_000)\nraise ValueError('late')")
    assert result.error == "ValueError: late"
    assert result.output.endswith("ValueError: late\n")


def test_a_fork_bomb_is_bounded_and_leaves_nothing_behind() -> None:
    code = """
        import os, time
        made = 0
        for _ in range(5000):
            try:
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(600)
                made += 1
            except OSError as error:
                print(made, error)
                break
        time.sleep(600)
        """

    async def work(server: ForkServer) -> CodeResult:
        task = asyncio.create_task(server.run_code(textwrap.dedent(code), ToolLimits(timeout_s=3, memory_mb=256)))
        await asyncio.sleep(1)
        assert (await server.run_code("print('others go on')", LIMITS)).output == "others go on\n"
        result = await task
        assert server.pid is not None
        wait_until(lambda: len(descendants(server.pid or 0)) <= 1)  # the zygote inside its namespace
        return result

    result = sandboxed(work)
    assert result.timed_out
    made, _, reason = result.output.partition(" ")
    assert 0 < int(made) < 100
    assert "Resource temporarily unavailable" in reason


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for parent in front for child in children.get(parent, [])]
        found += front
    return found


@pytest.mark.parametrize("target", ["os.getppid()", "1", "-1", "0"])
def test_killing_the_parent_or_everybody_harms_no_other_call(target: str) -> None:
    async def work(server: ForkServer) -> None:
        pid = server.pid
        other = asyncio.create_task(server.run_code("import time; time.sleep(0.5); print('fine')", LIMITS))
        await asyncio.sleep(0.1)
        await server.run_code(f"import os; os.kill({target}, 9)", LIMITS)
        assert (await other).output == "fine\n"
        assert (server.pid, server.restarts) == (pid, 0)

    sandboxed(work)


def test_reading_standard_input_fails_at_once() -> None:
    assert run("input()").error == "EOFError: EOF when reading a line"


def test_the_network_is_out_of_reach_even_on_this_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()  # from here it is reachable
        result = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)")
    assert result.error is not None
    assert "Network is unreachable" in result.error


def test_no_descriptor_but_the_standard_three_is_inherited(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)
        code = """
            import os
            for fd in range(1024):
                try:
                    os.fstat(fd)
                except OSError:
                    continue
                print(fd)
            """
        assert run(code).output == "0\n1\n2\n"


def test_the_environment_of_the_run_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY_OF_THE_RUN", "hunter2")
    result = run("import os; print(sorted(os.environ))")
    assert "PATH" in result.output
    assert "SECRET" not in result.output


def test_each_call_has_its_own_folder_which_is_removed(tmp_path: Path) -> None:
    code = "import os; print(os.getcwd(), os.listdir()); os.makedirs('a/b'); open('a/b/c', 'w').write('x')"

    async def work(server: ForkServer) -> list[str]:
        outputs = [(await server.run_code(code, LIMITS)).output for _ in range(2)]
        folder = outputs[0].split()[0]
        for _ in range(100):  # removal goes on after the answer
            gone = await server.run_code(f"import os; print(os.path.exists({folder!r}))", LIMITS)
            if gone.output == "False\n":
                break
        assert gone.output == "False\n"
        return outputs

    first, second = sandboxed(work)
    assert first.endswith(" []\n")
    assert second.endswith(" []\n")
    assert first != second


def test_files_outside_the_folder_cannot_be_changed(tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_text("keep me")
    tmp_path.chmod(0o777)
    victim.chmod(0o666)

    async def work(server: ForkServer) -> CodeResult:
        if "files" not in server.isolation:
            pytest.skip("this kernel or container allows no mount namespace")
        return await server.run_code(f"open({str(victim)!r}, 'w')", LIMITS)

    result = sandboxed(work)
    assert result.error is not None
    assert "Read-only file system" in result.error
    assert victim.read_text() == "keep me"


def test_crashing_the_interpreter_is_an_error_result() -> None:
    result = run("import ctypes; ctypes.string_at(0)")
    assert result.error == "ended by SIGSEGV"
    assert run("import sys; sys.exit(3)").error == "exit status 3"
    assert run("import sys; sys.exit()").error is None


def test_threads_are_waited_for() -> None:
    code = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()"
    assert run(code).output == "late\n"


def test_many_calls_run_side_by_side_and_are_not_mixed_up() -> None:
    async def work(server: ForkServer) -> float:
        started = time.monotonic()
        code = "import time; time.sleep(0.5); print({})"
        results = await asyncio.gather(*(server.run_code(code.format(i), LIMITS) for i in range(16)))
        assert [result.output for result in results] == [f"{i}\n" for i in range(16)]
        return time.monotonic() - started

    assert sandboxed(work) < 16 * 0.5


def test_a_killed_zygote_gives_error_results_and_is_started_again() -> None:
    async def work(server: ForkServer) -> None:
        assert server.pid is not None
        calls = [asyncio.create_task(server.run_code("import time; time.sleep(60)", LIMITS)) for _ in range(3)]
        await asyncio.sleep(0.3)
        os.killpg(server.pid, signal.SIGKILL)
        for result in await asyncio.gather(*calls):
            assert result.error == LOST
            assert not result.timed_out
        assert (await server.run_code("print('again')", LIMITS)).output == "again\n"
        assert server.restarts == 1

    sandboxed(work)


def test_a_cancelled_call_ends_its_process() -> None:
    async def work(server: ForkServer) -> None:
        assert server.pid is not None
        before = len(descendants(server.pid))
        call = asyncio.create_task(server.run_code("import time; time.sleep(60)", LIMITS))
        await asyncio.sleep(0.3)
        assert len(descendants(server.pid)) == before + 1
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        for _ in range(200):
            if len(descendants(server.pid)) == before:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the cancelled call still runs")

    sandboxed(work)


def test_stopping_ends_every_process_and_removes_the_scratch_folder() -> None:
    async def main() -> tuple[list[int], str]:
        server = ForkServer(isolate=True)
        await server.start()
        assert server.pid is not None
        call = asyncio.create_task(server.run_code("import time; time.sleep(60)", LIMITS))
        await asyncio.sleep(0.3)
        pids = [server.pid, *descendants(server.pid)]
        scratch = str(server._scratch)
        await server.stop()
        assert (await call).error == LOST
        return pids, scratch

    pids, scratch = asyncio.run(main())
    assert len(pids) >= 2
    wait_until(lambda: not any(alive(pid) for pid in pids))
    assert not os.path.exists(scratch)


PARENT = """
import asyncio, sys
from megatron_fr.agents.forkserver import ForkServer
from megatron_fr.config import ToolLimits
async def main():
    server = ForkServer(isolate={isolate})
    await server.start()
    if {isolate}:
        work = server.run_code("import time; time.sleep(600)", ToolLimits(timeout_s=500))
    else:
        work = server.call("subprocess:run", {{"args": ["sleep", "600"]}}, timeout_s=500)
    call = asyncio.create_task(work)
    await asyncio.sleep(0.3)
    print(server.pid, server._scratch, flush=True)
    await call
asyncio.run(main())
"""


@pytest.mark.parametrize("isolate", [True, False])
def test_the_zygote_and_its_calls_die_with_a_killed_parent(isolate: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(isolate=isolate)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert parent.stdout is not None
        number, scratch = parent.stdout.readline().split()
        zygote = int(number)
        pids = [zygote, *descendants(zygote)]
        assert len(pids) >= 2
        assert all(alive(pid) for pid in pids)
        assert os.path.exists(scratch) == isolate
        parent.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids))
        assert not os.path.exists(scratch)
    finally:
        parent.kill()
        parent.wait()


def test_the_zygote_is_in_its_own_session() -> None:
    async def work(server: ForkServer) -> None:
        assert server.pid is not None
        assert os.getsid(server.pid) == server.pid != os.getsid(0)

    sandboxed(work)


REFUSED = """
import asyncio, sys
from pathlib import Path
Path("/proc/sys/user/max_net_namespaces").write_text("0")
from megatron_fr.agents.forkserver import ForkServer
from megatron_fr.config import ToolLimits
from megatron_fr.errors import ToolError
async def main():
    strict = ForkServer(isolate=True, require_network_isolation=True)
    try:
        await strict.start()
    except ToolError as error:
        print("REFUSED", error)
    finally:
        await strict.stop()
    lax = ForkServer(isolate=True)
    await lax.start()
    print(sorted(lax.isolation), (await lax.run_code("print(6 * 7)", ToolLimits())).output)
    endless = "import os, time\\nif os.fork() == 0: time.sleep(600)\\nwhile True: pass"
    loop = await lax.run_code(endless, ToolLimits(timeout_s=1))
    print(loop.timed_out)
    await lax.stop()
asyncio.run(main())
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_without_network_namespaces_it_refuses_to_start_unless_told_not_to() -> None:
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", REFUSED]
    if subprocess.run([*command[:3], "true"], check=False).returncode:
        pytest.skip("this kernel allows no user namespace")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("REFUSED agent.tool.require_network_isolation=true"), done.stderr
    assert "set it to false" in lines[0]
    assert lines[1:] == ["['files'] 42", "", "True"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root to become somebody else")
def test_an_ordinary_user_gets_the_same_isolation_through_a_user_namespace() -> None:
    code = (
        "import asyncio\n"
        "from megatron_fr.agents.forkserver import ForkServer\n"
        "from megatron_fr.config import ToolLimits\n"
        "async def main():\n"
        "    server = ForkServer(isolate=True, require_network_isolation=True)\n"
        "    await server.start()\n"
        "    print(sorted(server.isolation))\n"
        "    bomb = 'import os, time\\nn = 0\\ntry:\\n    while True:\\n        if os.fork() == 0: time.sleep(600)\\n"
        "        n += 1\\nexcept OSError: print(n)'\n"
        "    print((await server.run_code(bomb, ToolLimits())).output.strip())\n"
        '    print((await server.run_code(\'open("/tmp/x", "w")\', ToolLimits())).error)\n'
        "    await server.stop()\n"
        "asyncio.run(main())\n"
    )
    # Reading stays allowed, as the interpreter may live in root's home.
    read = "+dac_read_search"
    become = [
        "setpriv",
        "--reuid=12345",
        "--regid=12345",
        "--clear-groups",
        f"--inh-caps={read}",
        f"--ambient-caps={read}",
    ]
    done = subprocess.run(
        [*become, sys.executable, "-B", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        cwd="/",
        check=False,
    )
    if "no network namespace" in done.stderr:
        pytest.skip("this kernel allows no unprivileged user namespace")
    isolation, made, error = done.stdout.splitlines()
    assert isolation == "['files', 'network', 'processes']", done.stderr
    assert 0 < int(made) < 100
    assert "Read-only file system" in error


def test_code_needs_the_isolating_kind_of_server() -> None:
    with pytest.raises(ValueError, match="isolate=True"):
        asyncio.run(ForkServer(isolate=False).run_code("print(1)", LIMITS))


def test_using_a_stopped_sandbox_is_an_error_that_says_so() -> None:
    async def main() -> None:
        server = ForkServer(isolate=True)
        await server.start()
        await server.stop()
        with pytest.raises(ToolError, match="was stopped"):
            await server.run_code("print(1)", LIMITS)

    asyncio.run(main())
