"""Calls the user's reward function, each time in a process of its own with a time limit."""

from __future__ import annotations

from dataclasses import asdict

from megatron_fr.agents.contract import RewardInput
from megatron_fr.agents.forkserver import ForkServer
from megatron_fr.config import RewardConfig
from megatron_fr.errors import RewardError


class FatalRewardError(RewardError):
    """The reward function failed too often in a row: the run must end."""

    fatal = True


class RewardRunner:
    """Scores finished conversations with ``reward.function``.

    The function is imported once, in a process that forks a child per call, and sees the environment and ``sys.path``
    of this process. It must not rely on state that it changes: each call's changes die with its child.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._server = ForkServer(isolate=False)
        self._errors_in_a_row = 0

    async def start(self) -> None:
        """Import the function.

        Raises:
            RewardError: it cannot be imported or is not callable.
        """
        function = self._config.function
        module, colon, name = function.partition(":")
        if not (module and colon and name):
            raise RewardError(f"reward.function={function!r} is no import path; give module:function")
        try:
            await self._server.start()
            for path in ("megatron_fr.agents.reward_call:score", function):
                if (reason := await self._server.preload(path)) is not None:
                    raise RewardError(
                        f"reward.function={function!r} cannot be imported: {reason}; give module:function of a "
                        "function on PYTHONPATH"
                    )
        except BaseException:
            await self._server.stop()
            raise

    async def score(self, episode: RewardInput) -> tuple[float, dict[str, float]]:
        """The reward, and the named parts (without the reward itself).

        Raises:
            RewardError: the function raised, took too long, or returned no finite number. The message ends with the
                traceback's last line.
            FatalRewardError: that was the ``reward.max_consecutive_errors``-th time in a row.
        """
        config = self._config
        arguments = {"function": config.function, "episode": asdict(episode)}
        result = await self._server.call("megatron_fr.agents.reward_call:score", arguments, timeout_s=config.timeout_s)
        if result.error is None:
            self._errors_in_a_row = 0
            parts = dict(result.value)
            return parts.pop("reward"), parts
        self._errors_in_a_row += 1
        where = f"reward.function={config.function!r} on prompt {episode.prompt.id!r}"
        hint = f"; raise reward.timeout_s={config.timeout_s:g} or make it faster" if result.timed_out else ""
        if self._errors_in_a_row >= config.max_consecutive_errors:
            raise FatalRewardError(
                f"{where} failed {self._errors_in_a_row} times in a row (reward.max_consecutive_errors): "
                f"{result.error}{hint}"
            )
        raise RewardError(f"{where}: {result.error}{hint}")

    async def stop(self) -> None:
        """End the process and every running call."""
        await self._server.stop()
