# orca-dist with all it needs, for CPUs or NVIDIA GPUs:
#   docker build -t orca-dist:0.1.0 .                                   (DEVICE=cpu)
#   docker build -t orca-dist:0.1.0-cuda --build-arg DEVICE=cuda .
# TORCH_INDEX_URL: an index with builds of torch to prefer, such as PyTorch's own of CPU wheels;
# without it torch comes with its CUDA libraries, which run on CPUs as well, and take 4 GB.
ARG PYTHON_VERSION=3.11
FROM python:${PYTHON_VERSION}-slim-bookworm

ARG DEVICE=cpu
ARG TORCH_INDEX_URL=""

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# g++ builds the CPU kernels at first use, for the CPU that is there, and what Triton asks for on
# GPUs. Versions follow the base image's release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ tini \
    && rm -rf /var/lib/apt/lists/*

RUN groupadd --gid 10001 orca \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/orca orca

WORKDIR /opt/orca-dist
COPY constraints.txt ./
RUN PIP_EXTRA_INDEX_URL="${TORCH_INDEX_URL}" \
    pip install --no-cache-dir -c constraints.txt "$(grep '^torch==' constraints.txt)"

COPY pyproject.toml README.md LICENSE NOTICE ./
COPY orca_dist ./orca_dist
COPY kernels ./kernels
RUN if [ "${DEVICE}" = cuda ]; then extra='[gpu]'; else extra=''; fi \
    && pip install --no-cache-dir -c constraints.txt ".${extra}" \
    && rm -rf build ./*.egg-info

ENV HOME=/home/orca \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /home/orca
EXPOSE 50051

# Plain text on 127.0.0.1; ORCA_ADDRESS changes the address. A model takes its time to load.
HEALTHCHECK --interval=15s --timeout=10s --start-period=15m --retries=3 \
    CMD ["python", "-m", "orca_dist.client.healthcheck"]

ENTRYPOINT ["tini", "--", "orca-dist"]
CMD ["--help"]
