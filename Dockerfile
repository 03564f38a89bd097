# mtgrpo in a container: the steps of docs/command.md#install.
#   docker build -t mtgrpo .                        # the CPU build of torch
#   docker build -t mtgrpo --build-arg TORCH=gpu .  # that of a GPU: several GB; --build-arg EXTRAS=data,search
#   docker run --rm -v "$PWD/runs:/runs" mtgrpo train hydra.run.dir=/runs/a
# mtgrpo launch docker KEY=VALUE ... does both.
# SageMaker takes it from your registry as image=ACCOUNT.dkr.ecr.REGION.amazonaws.com/mtgrpo.
FROM python:3.12-slim
ARG TORCH=cpu
ARG EXTRAS=
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap build-essential \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /mtgrpo
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts scripts
COPY src src
RUN if [ "$TORCH" = gpu ]; then python3 -m venv .venv && .venv/bin/python -m pip install "torch>=2.11,<2.14" -c constraints.txt; fi
RUN scripts/setup.sh run
RUN if [ -n "$EXTRAS" ]; then .venv/bin/python -m pip install -e ".[$EXTRAS]" -c .venv/constraints.txt; fi
ENV PATH=/mtgrpo/.venv/bin:$PATH
ENTRYPOINT ["mtgrpo"]
CMD ["--help"]
