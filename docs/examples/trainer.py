"""transformers' Trainer with a planned module: half the memory, the same numbers. Nothing is downloaded.

    python docs/examples/trainer.py

The Trainer gets a module that looks like the model: it takes the same keywords and has the same state. It returns the loss
alone, so the Trainer is told not to look for anything else, and to save the model itself. What the Trainer divides the loss by,
the number of targets in all the batches of an update, changes from one to the next, so it is an input of the plan.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from planner import plan


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random sequences: enough to see a loss fall."""

    def __init__(self, count: int = 32, length: int = 64) -> None:
        self.ids = torch.randint(50, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class LossTrainer(Trainer):
    """The model returns its loss, and is what is saved."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if not model.training:  # the plain model's output
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = model(**inputs, num_items_in_batch=torch.as_tensor(num_items_in_batch).float())
        return (loss, {"loss": loss}) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """A planned module would be saved as any module: without the configuration, and tied weights are refused."""
        module: Any = self.model
        self.model = module.step.model
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model = module


def train(kind: type[Trainer], model: nn.Module, data: Words) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            logging_steps=1,
            save_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
            dataloader_drop_last=True,  # or p.module(replan=True)
            label_names=["labels"],  # which the Trainer looks for in the model's forward, and a planned module takes anything
        )
        trainer = kind(model=model, args=arguments, train_dataset=data)
        trainer.train()
        assert trainer.evaluate(data)["eval_loss"] > 0
        trainer.save_model()
        saved = GPT2LMHeadModel.from_pretrained(folder).state_dict()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def make_model() -> GPT2LMHeadModel:
    set_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=64, n_embd=64, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    return model.train()


def main() -> None:
    data = Words()
    batch = {key: torch.stack([data[i][key] for i in range(8)]) for key in ("input_ids", "labels")}
    batch["num_items_in_batch"] = torch.tensor(8 * 63.0)
    model = make_model()
    p = plan(model, 0.5, inputs=batch, gap=0.02, time_limit_s=10)
    print(f"{p.peak_bytes:,} bytes instead of {plan(p.step, 1.0).peak_bytes:,}, {p.overhead:.2%} more time")
    losses = train(LossTrainer, p.module(), data)
    print("losses", losses)
    print("same losses as the plain Trainer:", losses == train(Trainer, make_model(), data))


if __name__ == "__main__":
    main()
