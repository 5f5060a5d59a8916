"""A plain training loop with a planned module: half the memory, the same numbers.

    python docs/examples/plain_loop.py

Only the two lines marked with an arrow are not those of an ordinary loop.
"""

from __future__ import annotations

import copy
import logging

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from planner import plan


def make_model() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Dropout(0.1))

    return nn.Sequential(*(block() for _ in range(6)), nn.Linear(128, 10))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    model = make_model()
    twin = copy.deepcopy(model)
    data = TensorDataset(torch.randn(2304, 128), torch.randint(10, (2304,)))
    loss_of = nn.CrossEntropyLoss()

    def loader() -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(data, batch_size=512)  # the last batch has 256

    p = plan(model, 0.5, inputs=data[:512], loss=loss_of, gap=0.02, time_limit_s=10)  # <-
    module = p.module(replan={"gap": 0.02, "time_limit_s": 10})  # <- inputs of another shape are planned for when they come
    print(f"{p.peak_bytes:,} bytes instead of {plan(p.step, 1.0).peak_bytes:,}, {p.overhead:.2%} more time")

    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        for x, y in loader():
            loss = module(x, y)  # the loss is part of the plan
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print("losses", " ".join(f"{loss:.3f}" for loss in losses))

    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    wanted = []
    for _ in range(2):
        for x, y in loader():
            loss = loss_of(twin(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            wanted.append(loss.item())
    print("same losses as plain PyTorch:", losses == wanted)


if __name__ == "__main__":
    main()
