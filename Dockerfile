# Image for pretraining on NVIDIA GPUs: PyTorch's CUDA image plus the requirements of pyproject.toml. Its torch is kept.
#   docker build --tag megatron-tds .
#   docker run --rm --init --gpus all --ipc host --stop-timeout 120 -v "$PWD/runs:/home/trainer/megatron-tds/runs" megatron-tds
# docs/launching.md explains the flags. Tests lint this file, but do not build the image. The `devel` base image has
# nvcc and a C++ compiler, which --compile and the attention kernel for CPUs need. BASE selects another CUDA version.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# If Python belongs to the distribution, pip would refuse to install packages.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    DS_BUILD_OPS=0

WORKDIR /tmp/requirements
COPY pyproject.toml ./
# Use --build-arg PIP_INDEX_URL=https://... for a package mirror. The constraints keep torch, triton and the CUDA
# libraries of the image; the build fails if pyproject.toml requires another version of torch.
ARG PIP_INDEX_URL
RUN python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > requirements.txt \
    && python3 -m pip list --format=freeze | { grep -E '^(torch|triton|nvidia-|cuda-)' || true; } > image.txt \
    && python3 -m pip install --requirement requirements.txt --constraint image.txt \
    && python3 -c 'import torch; assert torch.version.cuda, f"torch {torch.__version__} is no CUDA build"'

# The container does not run as root. Mounted folders must be writable for this user id: --build-arg UID=$(id -u).
ARG UID=1000
RUN if taken=$(id -nu "${UID}" 2> /dev/null); then userdel "${taken}"; fi \
    && useradd --create-home --uid "${UID}" --shell /bin/bash trainer \
    && install --directory --owner trainer /home/trainer/megatron-tds/runs /home/trainer/megatron-tds/data \
    && chown trainer /home/trainer/megatron-tds
WORKDIR /home/trainer/megatron-tds
COPY --chown=trainer . .
USER ${UID}
ENV PYTHON=python3

# A run script and its flags. Its launcher receives the container's signals: on `docker stop` the run saves and exits.
ENTRYPOINT ["bash"]
CMD ["run_gpt2.sh"]
