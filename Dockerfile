# An image for GPUs, in the versions of configs/constraints-gpu.txt: those were run on NVIDIA H200 with Python 3.12.
# This file itself was not built or run yet. Needs a driver for CUDA 13 and the NVIDIA container toolkit:
#   docker build --tag trl_atropos .
#   docker run --gpus all --shm-size 2g --volume "$PWD/runs:/app/runs" --volume "$HOME/.cache:/cache" \
#       trl_atropos train recipes/gsm8k/colocate.yaml
# torch's wheels bring CUDA's libraries. The compiler is for Triton, which builds a launcher for each kernel.

FROM python:3.12-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility PIP_NO_CACHE_DIR=1 XDG_CACHE_HOME=/cache

WORKDIR /src
COPY setup.cfg pyproject.toml MANIFEST.in README.md LICENSE ./
COPY configs configs
COPY recipes recipes
COPY trl_atropos trl_atropos
RUN pip install --constraint configs/constraints-gpu.txt ".[vllm]"
# DeepSpeed's set-up imports torch. Without its kernels, which need CUDA's compiler, the optimizer stays on the GPU.
RUN pip install "setuptools>=77" wheel \
    && DS_BUILD_OPS=0 pip install --constraint configs/constraints-gpu.txt --no-build-isolation "deepspeed>=0.19"

WORKDIR /app
COPY configs configs
COPY recipes recipes
ENTRYPOINT ["trl-atropos"]
