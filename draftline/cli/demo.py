"""The main job from end to end on the embedded default: train, evaluate, export."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from draftline.checkpoint.restore import restore
from draftline.checkpoint.store import checkpoint_paths
from draftline.choices import Choices
from draftline.config.load import load_config
from draftline.config.schema import Config
from draftline.data.builtin import demo_config
from draftline.decode.evaluate import PlainOutputs, Score, evaluate_drafter
from draftline.export.serving import export_drafter
from draftline.export.zlab import check_export
from draftline.model.drafter.backbone import Drafter
from draftline.model.target.target import Target
from draftline.train.loop import train
from draftline.train.plan.inputs import Inputs, open_target, prepare, template_arguments
from draftline.train.plan.named import check_named
from draftline.train.plan.start import feature_worker, first_drafter

log = logging.getLogger(__name__)


def run_demo(overrides: Sequence[str], out: Path) -> Table:
    """The final table of a demo run; checkpoint and export are where it says."""
    began = time.perf_counter()
    check_export(out, "bfloat16", overwrite=True)
    config = load_config(demo_config(), overrides)
    free = _free_directory(config.run.dir)
    config = load_config(demo_config(), [*overrides, f"run.dir={free}"])
    check_named(config)
    choices = Choices(strict=config.run.strict_choices)
    inputs = prepare(config, choices)
    target = open_target(config, choices)
    plain = PlainOutputs()
    log.info("evaluating the untrained drafter, and the target alone, on held-out prompts")
    worker = feature_worker(config, inputs, target, None, target.device, choices)
    untrained = first_drafter(config, inputs, target, worker, choices)
    before = _evaluate(config, inputs, target, untrained.to(target.dtype), plain)
    trained = train(config, choices=choices, inputs=inputs, target=target)
    assert trained.checkpoint is not None, "this is the first machine"
    restored = restore(trained.checkpoint)
    drafter = restored.drafter(target.device, target.dtype)
    log.info("evaluating the trained drafter")
    after = _evaluate(config, inputs, target, drafter, plain)
    for line in export_drafter(restored, target, out, overwrite=True, choices=choices):
        log.info("%s", line)
    table = Table(title="draftline demo", show_header=False)
    rows = [
        ("target", f"{config.target.path} on {target.device}"),
        ("held-out prompts", f"{after.prompts}, greedy, {after.batch_size} at a time"),
        ("accept_length before training", f"{before.accept_length:.3f}"),
        ("accept_length after training", f"{after.accept_length:.3f}"),
        ("tokens/s plain", f"{after.plain_tokens_per_s:.1f}"),
        ("tokens/s speculative", f"{after.tokens_per_s:.1f}"),
        ("output identical to plain", f"{after.identical} of {after.compared} prompts"),
        ("training", f"{trained.step} steps in {trained.seconds:.0f} s"),
        ("whole demo", f"{time.perf_counter() - began:.0f} s"),
        ("checkpoint", str(trained.checkpoint)),
        ("export", str(out)),
    ]
    if trained.heldout is not None:
        uniform, chain = trained.heldout.accept_length_heldout, trained.heldout.accept_length_chain
        rows.insert(4, ("in training, held out", f"{uniform:.3f} uniform, {chain:.3f} as a chain"))
    for name, value in rows:
        table.add_row(name, value)
    return table


def _evaluate(
    config: Config, inputs: Inputs, target: Target, drafter: Drafter, plain: PlainOutputs
) -> Score:
    return evaluate_drafter(
        target,
        drafter,
        inputs.token_ids,
        config.evaluate,
        template=template_arguments(config, inputs.date),
        seed=config.run.seed,
        temperatures=[0.0],
        plain=plain,
    )[0]


def _free_directory(wanted: str) -> str:
    """`wanted`, or `wanted-2`, `wanted-3`, ... where an earlier demo left its checkpoints."""
    candidate, number = Path(wanted), 1
    while checkpoint_paths(candidate / "checkpoints"):
        number += 1
        candidate = Path(f"{wanted}-{number}")
    return str(candidate)
