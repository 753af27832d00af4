# The page in a container, with the embedded model inside, so that it runs without a network.
#
#   docker build -t specdemo .
#   docker run --rm -p 7860:7860 -v specdemo-cache:/home/user/cache specdemo
#
# TORCH says which build of torch, and with it which image: the registry's for Linux brings CUDA and several gigabytes
# (docker run --gpus all ...). A processor alone needs less; name an index that has such builds:
#
#   docker build --build-arg TORCH=torch==2.13.0+cpu --build-arg PIP_ARGUMENTS="--extra-index-url ADDRESS" .
#
# Models from the hub are kept in the volume. EMBEDDED=no leaves the embedded model out: 270 MB less, and it is fetched at
# every start. As a Docker Space this starts as it is: port 7860, user 1000. It was written without a container engine at
# hand: its paths, user, port and commands are tested and it is linted, a build of it is not.
FROM python:3.11-slim

ARG TORCH="torch==2.13.0"
ARG PIP_ARGUMENTS=""
ARG EMBEDDED="yes"

RUN useradd --create-home --uid 1000 user
USER 1000
WORKDIR /home/user/app
ENV PATH=/home/user/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    SPECDEMO_CACHE=/home/user/embedded \
    HF_HOME=/home/user/cache/huggingface

# The dependencies change seldom: they come before the code, each in a layer of its own.
COPY --chown=1000 requirements.txt constraints.txt ./
# hadolint ignore=DL3013  # TORCH names a version
RUN python -m venv /home/user/venv && pip install ${PIP_ARGUMENTS} "${TORCH}"
RUN pip install ${PIP_ARGUMENTS} -r requirements.txt -c constraints.txt

COPY --chown=1000 specdemo ./specdemo
RUN mkdir /home/user/embedded /home/user/cache && \
    if [ "${EMBEDDED}" = "yes" ]; then python -m specdemo.models.embedded; fi

COPY --chown=1000 traces ./traces
COPY --chown=1000 app.py LICENSE README.md ./

VOLUME /home/user/cache
EXPOSE 7860
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7860/healthz', timeout=4)"]
CMD ["python", "app.py", "--host", "0.0.0.0", "--port", "7860", "--public"]
