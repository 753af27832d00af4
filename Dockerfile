# The page in a container, with the embedded model inside, so that it starts without a network.
#
#   docker build -t specdemo .
#   docker run --rm -p 7860:7860 specdemo
#
# The registry's torch for Linux brings CUDA and several gigabytes. A processor alone needs less; name an index with
# such builds: --build-arg PIP_ARGUMENTS="--extra-index-url ADDRESS" --build-arg TORCH="torch==2.13.0+cpu".
# This file was written without a Docker daemon at hand: its paths, user and ports are tested, a build of it is not.
FROM python:3.11-slim

ARG TORCH="torch==2.13.0"
ARG PIP_ARGUMENTS=""

RUN useradd --create-home --uid 1000 user
USER 1000
WORKDIR /home/user/app
ENV PATH=/home/user/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    SPECDEMO_CACHE=/home/user/specdemo-cache

# The dependencies change seldom: they come before the code, each in a layer of its own.
COPY --chown=1000 requirements.txt constraints.txt ./
RUN python -m venv /home/user/venv && pip install ${PIP_ARGUMENTS} "${TORCH}"
RUN pip install ${PIP_ARGUMENTS} -r requirements.txt -c constraints.txt

COPY --chown=1000 specdemo ./specdemo
RUN python -m specdemo.models.embedded

COPY --chown=1000 traces ./traces
COPY --chown=1000 app.py LICENSE README.md ./

EXPOSE 7860
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7860/', timeout=4)"]
CMD ["python", "app.py", "--host", "0.0.0.0", "--port", "7860"]
