# The serving image: the service and the default bundles, without torch. Each RUN is a script that
# also works outside Docker.
#
#   docker build --tag cloze .

# All stages share one base: a virtual environment refers to the interpreter that created it, so the
# paths of both must not change.
FROM python:3.11-slim AS interpreter

# ---- install: only what serving needs
FROM interpreter AS install
# pip reads these arguments: a mirror of the package index, or a second index.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
# The script runs before the sources are copied, to install the dependencies in a separate layer. A
# change of the code keeps this layer. A second run adds the project itself.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts/install-serving scripts/
RUN scripts/install-serving /opt/cloze
COPY cloze cloze
COPY model_store/*.py model_store/
COPY model_store/heads model_store/heads
COPY service service
RUN scripts/install-serving /opt/cloze


# ---- serving: the image
FROM interpreter AS serving
LABEL org.opencontainers.image.title="cloze" org.opencontainers.image.licenses="Apache-2.0"
# Both belong to root: the service can read its code and bundles, but cannot change them.
COPY --from=install /opt/cloze /opt/cloze
COPY model_store/bundles /bundles
ENV PATH=/opt/cloze/bin:$PATH \
    CLOZE_HOST=0.0.0.0 \
    CLOZE_MODEL_STORE=/bundles
# A number, so that Kubernetes can verify that the user is not root. The user owns no files and
# needs no entry in /etc/passwd.
USER 10001:10001
EXPOSE 8000
# The check ignores a proxy that the container may inherit: the proxy cannot reach loopback.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/readyz', timeout=4)"]
# No shell runs in between, so SIGTERM reaches the server, which drains.
ENTRYPOINT ["cloze"]
CMD ["serve"]
