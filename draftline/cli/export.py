"""`draftline export`: a trained drafter as the directory that engines load, and how to serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftline.cli.options import RunOrCheckpoint, expand


def export_command(
    run: RunOrCheckpoint,
    out: Annotated[
        Path, typer.Argument(help="Directory to write.", metavar="OUT", callback=expand)
    ],
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

    Prints the line that serves it with each engine that can tap this target, and the reason for
    each that cannot: vLLM takes num_speculative_tokens = block_size - 1, SGLang block_size.
    """
    from draftline.progress import doing

    with doing("loading PyTorch"):
        import torch

        from draftline.checkpoint.restore import restore
        from draftline.choices import Choices
        from draftline.export.engines import check_engine
        from draftline.export.serving import serving
        from draftline.export.zlab import check_export, export_zlab
        from draftline.train.plan.inputs import open_target

    check_export(out, dtype, overwrite)
    check_engine(engine)
    restored = restore(run, ["run.device=cpu"])
    config = restored.config
    choices = Choices(strict=config.run.strict_choices)
    target = open_target(config, choices)
    restored.check_target(target)
    with doing(f"writing {out}"):
        path = export_zlab(
            restored.drafter(torch.device("cpu"), torch.float32),
            target,
            restored.taps,
            restored.token_ids,
            out,
            dtype=dtype,
            engine=engine,
            overwrite=overwrite,
            choices=choices,
        )
    step, steps = restored.checkpoint.step, restored.checkpoint.state.get("total_steps", 0)
    unfinished = f" of {steps}, of a run that is not finished," if step < steps else ""
    typer.echo(f"exported step {step}{unfinished} to {path}")
    typer.echo("\n".join(serving(path, target, config.target)))
