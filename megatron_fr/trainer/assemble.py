"""The trainer of one rank, put together from the run's configuration."""

from __future__ import annotations

import socket
from pathlib import Path

from megatron_fr.checkpoint.training import TrainingCheckpoints
from megatron_fr.config import RunConfig
from megatron_fr.runtime.device import Device
from megatron_fr.trainer.data.client import RolloutClient
from megatron_fr.trainer.data.loader import BatchLoader
from megatron_fr.trainer.distributed import RankInfo
from megatron_fr.trainer.evaluation import Evaluation
from megatron_fr.trainer.export import WeightExport
from megatron_fr.trainer.loop import TrainerLoop
from megatron_fr.trainer.metrics import recorder
from megatron_fr.trainer.policy import build_policy
from megatron_fr.trainer.rescue import run_and_save
from megatron_fr.trainer.resume import begin_anew, go_on_from
from megatron_fr.trainer.stop import StopRequest
from megatron_fr.trainer.weight_push import WeightSync


def train(
    config: RunConfig, device: Device, info: RankInfo, service_url: str, stop: StopRequest, resume: Path | None
) -> Path:
    """Build this rank's trainer and run it to its end; the process groups must exist.

    Args:
        service_url: address of the rollout service.
        resume: the checkpoint to go on from; the service was restored from the same one. None: start anew.

    Returns:
        the Hugging Face folder of the last weights.

    Raises:
        MegatronFRError: the model cannot be built, the checkpoint does not fit, the engines cannot be reached, or see
            :func:`run_and_save`.
    """
    policy = build_policy(config, device)
    client = RolloutClient(service_url)
    loader = BatchLoader(config, policy, client, device.torch_device, lambda: bool(stop))
    # Engines on other machines need an address that they can reach; on one machine the loopback is enough.
    host = config.rollout.host if info.master_addr in ("127.0.0.1", "localhost") else socket.gethostname()
    sync = WeightSync(config, device, policy, loader, client, host)
    checkpoints = TrainingCheckpoints(config, policy, client.state)
    position = begin_anew(config.output, client) if resume is None else go_on_from(resume, client, checkpoints)
    if config.checkpoint.every == 0 and info.rank == 0:
        print("checkpoint.every=0: if this run is killed, the same command begins again", flush=True)
    with recorder(config) as record:
        loop = TrainerLoop(
            config=config,
            position=position,
            loader=loader,
            step=policy.step,
            sync=sync,
            evaluation=Evaluation(client, stop, enabled=bool(config.evaluation_sets)),
            checkpoints=checkpoints,
            export=WeightExport(config.output, policy.save_hf),
            record=record,
        )
        folder = run_and_save(loop)
    sync.close()
    client.close()
    return folder
