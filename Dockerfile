# The environment and the project in /opt/gemma-grpo, made by launch/bootstrap.sh, for TPU or CPU:
#
#   docker build -t gemma-grpo .
#   docker build -t gemma-grpo:cpu --build-arg EXTRA=cpu .
#   docker run --rm -it --privileged --net host --shm-size 16g -v ~/.cache:/root/.cache -v "$PWD:/work" \
#       gemma-grpo train /opt/gemma-grpo/configs/gemma3_1b_gsm8k_v5e8.toml
#
# Any Debian or Ubuntu that has a Python 3.11 or 3.12 can be the base.
ARG BASE=debian:bookworm-slim
FROM $BASE
# tpu, cpu or cuda13
ARG EXTRA=tpu
ENV PIP_NO_CACHE_DIR=1
WORKDIR /opt/gemma-grpo
# A change of other files does not install the requirements again.
COPY LICENSE README.md pyproject.toml requirements*.txt ./
COPY launch/*.sh launch/
RUN launch/bootstrap.sh --yes --no-doctor --$EXTRA && rm -rf /var/lib/apt/lists/*
COPY . .
WORKDIR /work
ENTRYPOINT ["/opt/gemma-grpo/.venv/bin/gemma-grpo"]
CMD ["--help"]
