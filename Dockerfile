# The environment of `make test`, from the same Makefile and constraints.txt:
#   docker build -t spurline . && docker run -it spurline make quick
# What runs need only (INSTALL=.venv/.runs), for NVIDIA's accelerators:
#   docker build --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg INSTALL=.venv/.runs \
#       --build-arg TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130" -t spurline-cu130 .
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH=
ARG INSTALL=.venv/.ready
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /spurline
COPY Makefile constraints.txt pyproject.toml README.md LICENSE ./
COPY spurline spurline
RUN make ${TORCH:+TORCH="${TORCH}"} ${INSTALL}
COPY . .
ENV PATH=/spurline/.venv/bin:$PATH
CMD ["spurline", "--help"]
