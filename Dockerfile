# Three images. Each RUN is a script that also works outside Docker.
#
#   docker build --tag cloze:cpu .                        serves on a CPU (the default target)
#   docker build --tag cloze:gpu --target gpu .           serves on NVIDIA's GPUs
#   docker build --tag cloze:export --target export .     exports and fetches models; has torch
#
# A serving image that is started with the one argument `serve`, as SageMaker starts it, listens on
# port 8080 and serves what /opt/ml/model has; see cloze/image.py.
#
# With --build-arg REVISION=$(git rev-parse HEAD), an image says which commit it is built from.

# A tag, or a tag with a digest: PYTHON_IMAGE=python:3.11-slim@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim
ARG REVISION=unknown

# All stages share one base: a virtual environment refers to the interpreter that created it, so the
# paths of both must not change. The GPU image has this base too: the CUDA libraries come from
# wheels, so the lock pins them with their hashes, as it pins every other package.
FROM ${PYTHON_IMAGE} AS interpreter


# ---- packages: what every installation needs
FROM interpreter AS packages
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY locks/build.txt locks/
COPY scripts/install-serving scripts/


# ---- sources: what every image installs of the project
FROM scratch AS sources
WORKDIR /
COPY client client
COPY cloze cloze
COPY model_store/cloze model_store/cloze
COPY service service


# ---- install-*: one virtual environment per image
# The script runs before the sources are copied, to install the dependencies in a separate layer. A
# change of the code keeps this layer. A second run adds the project itself and the SBOM.
# pip reads the arguments: a mirror of the package index, a second index, or a folder of wheels. Each
# stage declares them, because not every builder passes them on to a stage.
FROM packages AS install-cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
COPY locks/cpu.txt locks/
RUN scripts/install-serving /opt/cloze cpu
COPY --from=sources / ./
ARG REVISION
RUN scripts/install-serving /opt/cloze cpu

FROM packages AS install-gpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
COPY locks/gpu.txt locks/
RUN scripts/install-serving /opt/cloze gpu
COPY --from=sources / ./
ARG REVISION
RUN scripts/install-serving /opt/cloze gpu

FROM packages AS install-export
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
COPY locks/export.txt locks/
RUN scripts/install-serving /opt/cloze export
COPY --from=sources / ./
COPY export export
ARG REVISION
RUN scripts/install-serving /opt/cloze export


# ---- runtime: what the images share
FROM interpreter AS runtime
ARG REVISION
LABEL org.opencontainers.image.title="cloze" org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/cloze/bin:$PATH \
    CLOZE_MODEL_STORE=/bundles
# A number, so that Kubernetes can verify that the user is not root. The user owns no files and
# needs no entry in /etc/passwd.
USER 10001:10001
# No shell runs in between, so SIGTERM reaches the server, which drains.
ENTRYPOINT ["cloze"]

# ---- export: torch, and no bundles. Mount a writable folder on /bundles.
FROM runtime AS export
# The home directory is read-only for the user; downloads of the hub go to a folder that is not.
ENV HF_HOME=/tmp/hub
COPY --from=install-export /opt/cloze /opt/cloze
CMD ["--help"]

# ---- serving: what the serving images share
FROM runtime AS serving
LABEL org.opencontainers.image.licenses="Apache-2.0 AND CC-BY-SA-4.0" \
    com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true"
ENV CLOZE_HOST=0.0.0.0
# Bundles and code belong to root: the service can read both, but cannot change them.
COPY model_store/bundles /bundles
EXPOSE 8000
# Asks the address, the port and the scheme that the variables CLOZE_... set; it uses no proxy. A port
# that is set by the flag --port, and not by CLOZE_PORT, is unknown to it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-m", "cloze.health"]
# Without an argument, the entrypoint serves, so that the argument `serve` can mean something else.
ENTRYPOINT ["python", "-m", "cloze.image"]
CMD []

FROM serving AS gpu
# NVIDIA's container toolkit mounts the driver's libraries for these uses.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=install-gpu /opt/cloze /opt/cloze

FROM serving AS cpu
COPY --from=install-cpu /opt/cloze /opt/cloze
