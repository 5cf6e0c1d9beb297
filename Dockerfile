# vla_gym and its trainers; images are drawn by Mesa in software, or on a GPU where there is one:
#
#     docker build -t vla-gym .
#     docker run --rm -v vla-gym-cache:/root/.cache/vla-gym vla-gym vla-gym eval --task-ids 9 --out /tmp/eval
#     docker run --rm --gpus all vla-gym vla-gym doctor      # needs the NVIDIA container toolkit
#
# PyPI's torch for Linux brings CUDA, some gigabytes. Without a GPU point pip at an index with CPU
# builds: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim

# All capabilities, as EGL is not among the default ones.
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH MUJOCO_GL=egl NVIDIA_DRIVER_CAPABILITIES=all
ARG TORCH_SPEC=torch==2.13.0
ARG EXTRAS=trainers
ARG PIP_EXTRA_INDEX_URL=
ARG PIP_NO_CACHE_DIR=1

WORKDIR /opt/vla-gym
COPY . .
RUN bash tools/setup.sh && rm -rf /var/lib/apt/lists/*

CMD ["vla-gym", "doctor"]
