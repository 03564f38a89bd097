"""Runs on machines of others: what they need is sent there, and how they start.

`bundle.py` is what a run needs elsewhere, `sizing.py` whether it fits there. `sagemaker.py` makes a training job,
`sagemaker_jobs.py` asks about it, `sagemaker_entry.py` is what it runs. `slurm.py` writes a script for sbatch.
"""
