"""`draftline export`: a trained drafter as the directory that engines load, and how to serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftline.cli.options import Overrides, TrainedDrafter, expand


def export_command(
    drafter: TrainedDrafter,
    out: Annotated[
        Path, typer.Argument(help="Directory to write.", metavar="OUT", callback=expand)
    ],
    overrides: Overrides = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32.")] = "bfloat16",
    engine: Annotated[
        str,
        typer.Option(
            help="auto, vllm, sglang, dflash: matters where the target multiplies its embeddings "
            "(Gemma, Granite), which vLLM needs folded into the drafter's weights."
        ),
    ] = "auto",
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace OUT where it is an export of draftline, or empty."
        ),
    ] = False,
) -> None:
    """Write the drafter in the z-lab layout, for vLLM, SGLang and the dflash package.

    DRAFTER is a run (its newest checkpoint), a checkpoint, or an exported directory, draftline's or
    another's, which needs target.path=PATH. Of the target its shapes are read, and its head where the
    drafter has a vocabulary of its own.

    Prints the line that serves it with each engine that can tap this target, and the reason for
    each that cannot: vLLM takes num_speculative_tokens = block_size - 1, SGLang block_size.
    """
    from draftline.progress import doing

    with doing("loading PyTorch"):
        from draftline.checkpoint.restore import restore
        from draftline.choices import Choices
        from draftline.export.engines import check_engine
        from draftline.export.serving import export_drafter
        from draftline.export.zlab import check_export
        from draftline.train.plan.inputs import open_outline

    check_export(out, dtype, overwrite)
    check_engine(engine)
    restored = restore(drafter, [*(overrides or []), "run.device=cpu"])
    config = restored.config
    choices = Choices(strict=config.run.strict_choices)
    target = open_outline(config, choices, with_head=restored.token_ids is not None)
    with doing(f"writing {out}"):
        lines = export_drafter(
            restored,
            target,
            out,
            dtype=dtype,
            engine=engine,
            overwrite=overwrite,
            choices=choices,
        )
    what = f"{restored.path}" if restored.step is None else f"step {restored.step}"
    if restored.step is not None and restored.step < (restored.total_steps or 0):
        what += f" of {restored.total_steps}, of a run that is not finished,"
    typer.echo(f"exported {what} to {out}")
    typer.echo("\n".join(lines))
