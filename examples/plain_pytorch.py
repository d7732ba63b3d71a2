"""A plain PyTorch loop whose memory is recorded: the numbered lines are all it takes.

    python examples/plain_pytorch.py
    draftline diagnose signal.jsonl

Runs on a GPU, or on the CPU, where there are steps and compile events and no device memory.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from draftline import signal  # 1

STEPS, ROWS, WIDTH = 60, 64, 128


def main() -> None:
    signal.start("signal.jsonl", expects=["compiled"])  # 2: may be left out
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # On a CPU the default backend builds C++, which takes longer than the whole example.
    backend = "inductor" if device.type == "cuda" else "aot_eager"

    @torch.compile(fullgraph=True, backend=backend)
    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(model(rows), rows)

    for number in range(1, STEPS + 1):
        rows = torch.randn(ROWS, WIDTH, device=device)
        with signal.step(tokens=ROWS):  # 3
            loss = loss_of(rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if number % 20 == 0:
            with signal.phase("checkpoint"):  # 4: a pause, and not the fault of the loop
                torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
