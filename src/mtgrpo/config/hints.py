"""What options of other libraries are called here: TRL's, verl's and TorchRL's names, for messages alone."""

from __future__ import annotations

# A name without a dot is also found at the end of a longer one. The first of the words given is the setting.
ELSEWHERE = {
    # TRL (GRPOConfig)
    "num_generations": "rollout.group_size",
    "per_device_train_batch_size": "rollout.prompts_per_step",
    "gradient_accumulation_steps": "batch.token_budget, which bounds what is computed at once",
    "steps_per_generation": "trainer.minibatch_trajectories",
    "num_iterations": "trainer.updates_per_batch",
    "max_completion_length": "sampling.max_new_tokens for a turn, rollout.max_trajectory_tokens for all of them",
    "max_prompt_length": "environment.max_context_length",
    "max_steps": "trainer.steps",
    "num_train_epochs": "trainer.epochs",
    "learning_rate": "optimizer.lr",
    "lr_scheduler_type": "optimizer.schedule",
    "max_grad_norm": "optimizer.max_grad_norm",
    "beta": "kl.coef",
    "epsilon_high": "algorithm.clip_high",
    "scale_rewards": "algorithm.divide_by_std",
    "loss_type": "algorithm.average",
    "mask_truncated_completions": "algorithm.truncated=mask",
    "model_name_or_path": "model.name",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "resume_from_checkpoint": "resume=true",
    "eval_steps": "eval.every_steps",
    "output_dir": "hydra.run.dir",
    "report_to": "log",
    # verl
    "rollout.n": "rollout.group_size",
    "train_batch_size": "rollout.prompts_per_step",
    "max_response_length": "rollout.max_trajectory_tokens",
    "max_assistant_turns": "environment.max_turns",
    "tool_config_path": "environment.tools",
    "ppo_mini_batch_size": "trainer.minibatch_trajectories",
    "ppo_epochs": "trainer.updates_per_batch",
    "ppo_max_token_len_per_gpu": "batch.token_budget",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "loss_agg_mode": "algorithm.average",
    "entropy_coeff": "algorithm.entropy_coef",
    "kl_loss_coef": "kl.coef",
    "kl_loss_type": "kl.estimator",
    "kl_coef": "kl.coef",
    "use_kl_in_reward": "kl.place=reward",
    "norm_adv_by_std_in_grpo": "algorithm.divide_by_std",
    "adv_estimator": "algorithm",
    "optim.lr": "optimizer.lr",
    "model.path": "model.name",
    "lora_rank": "model.lora.rank",
    "total_epochs": "trainer.epochs",
    "total_training_steps": "trainer.steps",
    "test_freq": "eval.every_steps",
    "save_freq": "checkpoint.every_steps",
    "resume_mode": "resume=true",
    "custom_reward_function.path": "reward=path/to/file.py:Name",
    # TorchRL
    "clip_epsilon": "algorithm.clip_low",
    "entropy_coeff_start": "algorithm.entropy_coef",
    "kl_to_ref_coeff": "kl.coef",
    "repeats": "rollout.group_size",
    "dialog_turns_per_batch": "rollout.prompts_per_step",
    "optim_batch_size": "trainer.minibatch_trajectories",
}


def hint(key: str) -> str:
    """What option `key` of another library is called here; "" where it is not known."""
    parts = key.split(".")
    names = (".".join(parts[start:]) for start in range(len(parts)))
    return next((ELSEWHERE[name] for name in names if name in ELSEWHERE), "")
