# The environment of `make test`, from the same pins: docker build -t spurline . && docker run -it spurline make quick
# For CUDA: docker build --build-arg TORCH=torch --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 .
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH=torch==2.13.0
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /spurline
COPY Makefile pyproject.toml README.md LICENSE ./
COPY spurline spurline
RUN make TORCH="${TORCH}" .venv/.ready
COPY . .
ENV PATH=/spurline/.venv/bin:$PATH
CMD ["spurline", "--help"]
