"""A plain PyTorch loop whose memory is recorded: the four marked lines are all it takes.

    python examples/plain_pytorch.py
    draftline diagnose signal.jsonl

Runs on a GPU, or on the CPU, where there are steps and compile events and no device memory.
"""

from __future__ import annotations

import torch

from draftline import signal  # 1

STEPS, ROWS, WIDTH = 60, 64, 128


def main() -> None:
    signal.start("signal.jsonl", expects=["compiled"])  # 2: optional, names the file
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @torch.compile(fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(rows), rows)

    for number in range(STEPS):
        rows = torch.randn(ROWS, WIDTH, device=device)
        with signal.step(tokens=ROWS):  # 3
            loss = loss_of(rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if number % 20 == 19:
            with (
                signal.phase("evaluate"),
                torch.no_grad(),
            ):  # 4: a pause that is not the loop's fault
                print(f"step {number + 1}: loss {loss_of(rows).item():.4f}")


if __name__ == "__main__":
    main()
