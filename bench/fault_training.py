"""The training that the corpus' programs break: one object, a step, and its variations."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fault_model import Model
from fault_session import Session
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

BATCHES = 4


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


class Training:
    """A model, AdamW and a few batches. `compiled=False` runs the model eagerly; `flex=False` uses
    scaled_dot_product_attention (as a CPU always does: no backward of flex_attention there)."""

    def __init__(
        self, session: Session, *, compiled: bool = True, flex: bool = True, **options: Any
    ) -> None:
        session.phase("load")
        size, device = session.size, session.device
        self.session = session
        torch.manual_seed(session.random.randrange(1 << 30))
        self.model = Model(size).to(device, torch.bfloat16)
        trained = [value for value in self.model.parameters() if value.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=1e-4, fused=session.cuda, capturable=session.cuda
        )
        self.mask = None
        if flex and session.cuda:
            length = size.length
            self.mask = create_block_mask(_causal, None, None, length, length, device=device)
        shape = (BATCHES, size.batch, size.length)
        self.batches = torch.randint(size.vocab, shape, device=device)
        self.tokens = self.batches[0].clone()
        self.forward = session.compile(self.model, **options) if compiled else self.model

    def feed(self, number: int) -> None:
        self.tokens.copy_(self.batches[number % BATCHES])

    def loss(self, *more: Tensor | None, tokens: Tensor | None = None) -> Tensor:
        tokens = self.tokens if tokens is None else tokens
        loss: Tensor = self.forward(tokens, tokens.roll(-1, 1), self.mask, *more)
        return loss

    def update(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, number: int) -> None:
        self.feed(number)
        self.update(self.loss())

    def step_of(self, number: int, length: int) -> None:
        """A step on the first `length` tokens of each row."""
        self.update(self.loss(tokens=self.batches[number % BATCHES, :, :length].contiguous()))

    def captured(self) -> Callable[[int], None]:
        """A warmed whole step as one graph; the call feeds it first."""
        self.session.warm(self.step, 4)
        play = self.session.capture(self.replayable)

        def step(number: int) -> None:
            self.feed(number)
            play()

        return step

    def replayable(self) -> None:
        self.update(self.loss())

    def each_layer(self, probe: Callable[[Tensor], None]) -> None:
        for layer in self.model.layers:
            layer.probe = probe

    @torch.no_grad()
    def evaluate(self, rows: int, batches: int) -> None:
        """Losses of larger batches, eagerly and outside the steps."""
        tokens = self.batches.flatten(0, 1)
        tokens = tokens.repeat(-(-rows // len(tokens)), 1)[:rows]
        for _ in range(batches):
            self.model(tokens, tokens.roll(-1, 1), None).item()

    def checkpoint(self) -> None:
        """Copies the state to (pinned) host memory, as an asynchronous writer does, and saves it."""
        copies = []
        for value in self.model.state_dict().values():
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=self.session.cuda)
            copies.append(copy.copy_(value, non_blocking=True))
        self.session.sync()
        with tempfile.TemporaryDirectory() as directory:
            torch.save(copies, Path(directory) / "state.pt")


class Distance(nn.Module):
    """A small extra loss that programs compile again and again. `temperature` is a plain float, on
    which Dynamo specialises, and `shift` a plain int."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        size = session.size
        scores = torch.randn(size.batch, size.length, 64, device=session.device)
        self.scores = nn.Parameter(scores)
        self.temperature = 1.0

    def forward(self, scores: Tensor, shift: int = 1) -> Tensor:
        moved = scores * shift - scores.mean(1, keepdim=True) * self.temperature
        return (moved.sigmoid() * scores).square().mean()
