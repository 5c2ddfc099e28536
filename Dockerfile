# Pretraining on NVIDIA GPUs: PyTorch's CUDA image, and what pyproject.toml requires beside its torch, which stays.
#   docker build --tag megatron-tds .
#   docker run --rm --init --gpus all --ipc host --stop-timeout 120 -v "$PWD/runs:/home/trainer/megatron-tds/runs" megatron-tds
# docs/launching.md explains the flags. Linted by the tests; neither the image below was pulled nor this one built there.
# `devel` has nvcc and a C++ compiler, which --compile and the CPU's attention kernel use. ARG: another CUDA, a mirror.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The image's Python may be its distribution's own, which otherwise refuses packages beside apt's.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    DS_BUILD_OPS=0

WORKDIR /tmp/requirements
COPY pyproject.toml ./
# A mirror: --build-arg PIP_INDEX_URL=https://... . Constraints keep torch, triton and CUDA's libraries as they are, and
# a torch of another version than pyproject.toml's ends the build here rather than replace them.
ARG PIP_INDEX_URL
RUN python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > requirements.txt \
    && python3 -m pip list --format=freeze | { grep -E '^(torch|triton|nvidia-|cuda-)' || true; } > image.txt \
    && python3 -m pip install --requirement requirements.txt --constraint image.txt \
    && python3 -c 'import torch; assert torch.version.cuda, f"torch {torch.__version__} is no CUDA build"'

# Not root. A folder that is mounted into the container must be writable for this number: --build-arg UID=$(id -u).
ARG UID=1000
RUN if taken=$(id -nu "${UID}" 2> /dev/null); then userdel "${taken}"; fi \
    && useradd --create-home --uid "${UID}" --shell /bin/bash trainer \
    && install --directory --owner trainer /home/trainer/megatron-tds/runs /home/trainer/megatron-tds/data \
    && chown trainer /home/trainer/megatron-tds
WORKDIR /home/trainer/megatron-tds
COPY --chown=trainer . .
USER ${UID}
ENV PYTHON=python3

# A run script and its flags, so that its launcher is the process that signals reach: `docker stop` saves and ends.
ENTRYPOINT ["bash"]
CMD ["run_gpt2.sh"]
