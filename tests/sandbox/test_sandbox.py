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

from megatron_fr.config import ToolLimits
from megatron_fr.errors import RolloutEnded, ToolError
from megatron_fr.sandbox import CodeResult, Sandbox
from megatron_fr.sandbox.result import LOST, visible

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ToolLimits(timeout_s=20, memory_mb=256, output_chars=2000)
SHORT = ToolLimits(timeout_s=1, memory_mb=256, output_chars=2000)


def sandboxed[T](work: Callable[[Sandbox], Awaitable[T]]) -> T:
    async def main() -> T:
        server = Sandbox(LIMITS)
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
    assert "call.py" not in result.output


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

    async def work(server: Sandbox) -> CodeResult:
        task = asyncio.create_task(server.run_code(textwrap.dedent(code), ToolLimits(timeout_s=3, memory_mb=256)))
        await asyncio.sleep(1)
        assert (await server.run_code("print('others go on')", LIMITS)).output == "others go on\n"
        result = await task
        assert server.pid is not None
        wait_until(lambda: len(descendants(server.pid or 0)) <= 1)  # the warm interpreter
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
    async def work(server: Sandbox) -> None:
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


def test_each_call_has_an_empty_folder_of_its_own() -> None:
    code = "import os; print(os.getcwd(), os.listdir()); os.makedirs('a/b'); open('a/b/c', 'w').write('x')"

    async def work(server: Sandbox) -> list[str]:
        return [(await server.run_code(code, LIMITS)).output for _ in range(2)]

    assert sandboxed(work) == ["/scratch []\n"] * 2


def test_crashing_the_interpreter_is_an_error_result() -> None:
    result = run("import ctypes; ctypes.string_at(0)")
    assert result.error == "ended by SIGSEGV"
    assert run("import sys; sys.exit(3)").error == "exit status 3"
    assert run("import sys; sys.exit()").error is None


def test_threads_are_waited_for() -> None:
    code = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()"
    assert run(code).output == "late\n"


def test_many_calls_run_side_by_side_and_are_not_mixed_up() -> None:
    async def work(server: Sandbox) -> float:
        started = time.monotonic()
        code = "import time; time.sleep(0.5); print({})"
        results = await asyncio.gather(*(server.run_code(code.format(i), LIMITS) for i in range(16)))
        assert [result.output for result in results] == [f"{i}\n" for i in range(16)]
        return time.monotonic() - started

    assert sandboxed(work) < 16 * 0.5


def test_a_killed_sandbox_gives_error_results_and_is_started_again() -> None:
    async def work(server: Sandbox) -> None:
        assert server.pid is not None
        calls = [asyncio.create_task(server.run_code("import time; time.sleep(60)", LIMITS)) for _ in range(3)]
        await asyncio.sleep(0.3)
        os.kill(server.pid, signal.SIGKILL)
        for result in await asyncio.gather(*calls):
            assert result.error == LOST
            assert not result.timed_out
        assert (await server.run_code("print('again')", LIMITS)).output == "again\n"
        assert server.restarts == 1

    sandboxed(work)


def test_a_cancelled_call_ends_its_process() -> None:
    async def work(server: Sandbox) -> None:
        assert server.pid is not None
        pid = server.pid
        wait_until(lambda: len(descendants(pid)) == 1)  # the warm interpreter: the start's own call is gone
        call = asyncio.create_task(server.run_code("import time; time.sleep(60)", LIMITS))
        await asyncio.sleep(0.3)
        assert len(descendants(pid)) == 2
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        for _ in range(200):
            if len(descendants(pid)) == 1:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the cancelled call still runs")

    sandboxed(work)


def test_stopping_ends_every_process() -> None:
    async def main() -> list[int]:
        server = Sandbox(LIMITS)
        await server.start()
        assert server.pid is not None
        call = asyncio.create_task(server.run_code("import time; time.sleep(60)", LIMITS))
        await asyncio.sleep(0.3)
        pids = [server.pid, *descendants(server.pid)]
        await server.stop()
        assert (await call).error == LOST
        return pids

    pids = asyncio.run(main())
    assert len(pids) == 3
    wait_until(lambda: not any(alive(pid) for pid in pids))


PARENT = """
import asyncio
from megatron_fr.sandbox import Sandbox
from megatron_fr.config import ToolLimits
async def main():
    server = Sandbox(ToolLimits(timeout_s=500, sandbox="{sandbox}"))
    await server.start()
    call = asyncio.create_task(server.run_code("import time; time.sleep(600)"))
    await asyncio.sleep(0.3)
    print(server.pid, flush=True)
    await call
asyncio.run(main())
"""


@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
def test_the_warm_interpreter_and_its_calls_die_with_a_killed_parent(sandbox: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(sandbox=sandbox)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert parent.stdout is not None
        first = int(parent.stdout.readline())
        pids = [first, *descendants(first)]
        assert len(pids) >= 2
        assert all(alive(pid) for pid in pids)
        parent.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids))
    finally:
        parent.kill()
        parent.wait()


def test_the_sandbox_is_in_its_own_session() -> None:
    async def work(server: Sandbox) -> None:
        assert server.pid is not None
        assert os.getsid(server.pid) == server.pid != os.getsid(0)

    sandboxed(work)


REFUSED = """
import asyncio
from pathlib import Path
from megatron_fr.sandbox import Sandbox
from megatron_fr.config import ToolLimits
from megatron_fr.errors import ToolError
Path("/proc/sys/user/max_user_namespaces").write_text("0")
async def main():
    strict = Sandbox(ToolLimits())
    try:
        await strict.start()
    except ToolError as error:
        print("REFUSED", error)
    lax = Sandbox(ToolLimits(sandbox="none", timeout_s=1))
    await lax.start()
    print((await lax.run_code("print(6 * 7)")).output)
    print((await lax.run_code("import os, time\\nif os.fork() == 0: time.sleep(600)\\nwhile True: pass")).timed_out)
    await lax.stop()
asyncio.run(main())
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_without_user_namespaces_it_refuses_to_start_unless_told_not_to() -> None:
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", REFUSED]
    if subprocess.run([*command[:3], "true"], check=False).returncode:
        pytest.skip("this kernel allows no user namespace")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("REFUSED the tool sandbox"), done.stderr
    assert "user namespaces" in lines[0]
    assert "agent.tool.sandbox=none" in lines[0]
    assert lines[1:] == ["42", "", "True"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_the_main_job_ends_with_the_remedy_before_it_makes_a_model(tmp_path: Path) -> None:
    script = "echo 0 > /proc/sys/user/max_user_namespaces && exec launch/local.sh"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "MEGATRON_FR_CACHE": str(tmp_path)},
    )
    if "unshare failed" in done.stderr:
        pytest.skip("this kernel allows no user namespace")
    assert done.returncode == 1
    assert "error: the tool sandbox did not start" in done.stderr
    assert "agent.tool.sandbox=none" in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_bwrap_it_refuses_to_start_and_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(ToolError, match=r"install the package bubblewrap, or write agent.tool.sandbox=none"):
        run("print(1)")


def test_using_a_stopped_sandbox_is_an_error_that_says_so() -> None:
    async def main() -> None:
        server = Sandbox(LIMITS)
        await server.start()
        await server.stop()
        with pytest.raises(ToolError, match="was stopped"):
            await server.run_code("print(1)", LIMITS)

    asyncio.run(main())


def test_what_holds_is_known_and_logged_after_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        sandboxed(lambda server: asyncio.sleep(0))
    assert "network: none" in caplog.text
    assert "kernel interfaces: seccomp filter" in caplog.text


def test_calls_that_the_sandbox_cannot_run_are_counted_and_end_the_run() -> None:
    limits = LIMITS.model_copy(update={"max_refusals": 3})

    async def main() -> int:
        server = Sandbox(limits)
        await server.start()
        try:
            for _ in range(3):
                call = asyncio.create_task(server.run_code("import time; time.sleep(60)"))
                while server.pid is None or len(descendants(server.pid)) < 2:  # until the call runs
                    await asyncio.sleep(0.02)
                os.kill(server.pid, signal.SIGKILL)
                if server.refused < 2:
                    assert (await call).refused
                else:
                    with pytest.raises(RolloutEnded, match=r"refused 3 calls in a row .agent.tool.max_refusals"):
                        await call
            return server.refused
        finally:
            await server.stop()

    assert asyncio.run(main()) == 3


def test_one_trajectorys_calls_leave_slots_to_the_others() -> None:
    async def main() -> float:
        server = Sandbox(LIMITS, slots=6)
        await server.start()
        try:
            greedy = [asyncio.create_task(server.run_code("import time; time.sleep(2)", owner=1)) for _ in range(20)]
            await asyncio.sleep(0.2)
            started = time.monotonic()
            assert (await server.run_code("print(1)", owner=2)).output == "1\n"
            waited = time.monotonic() - started
            for call in greedy:
                call.cancel()
            await asyncio.gather(*greedy, return_exceptions=True)
            assert not server._owners
            return waited
        finally:
            await server.stop()

    assert asyncio.run(main()) < 1.5


def test_more_calls_of_one_trajectory_than_may_wait_are_answered_with_the_reason() -> None:
    async def work(server: Sandbox) -> list[CodeResult]:
        return await asyncio.gather(*(server.run_code("print(1)", owner=1) for _ in range(70)))

    errors = [result.error for result in sandboxed(work) if result.error is not None]
    assert errors == ["more than 64 calls at once"] * 6


def test_code_of_megabytes_is_not_run() -> None:
    assert run("x = 1\n" * 300_000).error == "the code has 1800000 characters; at most 1000000 are run"


@pytest.mark.parametrize(
    ("printed", "seen"),
    [
        ("\x1b[2Jtext\x07", "\\x1b[2Jtext\\x07"),
        ("a\r\nb\tc", "a\nb\tc"),
        ("100%\rdone", "100%\\rdone"),
        ("\x9b31m \u202e", "\\x9b31m \\u202e"),
        ("caf\u00e9 \u4e2d", "caf\u00e9 \u4e2d"),
    ],
)
def test_control_characters_of_the_output_are_spelled_out(printed: str, seen: str) -> None:
    assert visible(printed) == seen
