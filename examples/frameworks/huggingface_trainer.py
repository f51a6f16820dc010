"""Hugging Face's Trainer: torchrun --nproc-per-node 3 examples/frameworks/huggingface_trainer.py

A small Llama with random weights learns to count. If you run it again, it resumes from its newest checkpoint
whose state was certified; a checkpoint that was written after a rank went wrong is skipped.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from torchscout import ReplayConfig
from torchscout.plugins.huggingface import ResiliencyCallback, trusted_checkpoint


class Counting(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, first: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + first) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    args = TrainingArguments(
        "counting",
        max_steps=20,
        learning_rate=3e-3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_steps=5,
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, args, train_dataset=Counting())
    callback = ResiliencyCallback(trainer, replay=ReplayConfig(interval=5))
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=trusted_checkpoint(args.output_dir))
    if trainer.is_world_process_zero():
        print(f"found: {[each.sentence for each in callback.session.incidents] or 'nothing'}")


if __name__ == "__main__":
    main()
