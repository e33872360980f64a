# The serving image: the service, the default bundle, and no torch. Each RUN is a script that also works outside Docker.
#
#   docker build --tag cloze .

# One base for all stages: a virtual environment points at the interpreter it was made with, so both must lie where they lay.
FROM python:3.11-slim AS interpreter

# ---- install: what serving needs and nothing more
FROM interpreter AS install
# pip reads these: a mirror of the package index, or a second index.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
# The script runs before the sources come, to install what they need in a layer of its own that a changed line of code
# does not throw away; a second run then adds the project itself.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts/install-serving scripts/
RUN scripts/install-serving /opt/cloze
COPY cloze cloze
COPY model_store/*.py model_store/
COPY service service
RUN scripts/install-serving /opt/cloze


# ---- serving: the image
FROM interpreter AS serving
LABEL org.opencontainers.image.title="cloze" org.opencontainers.image.licenses="Apache-2.0"
# Both belong to root: the service can read its code and its bundles, not change them.
COPY --from=install /opt/cloze /opt/cloze
COPY model_store/bundles /bundles
ENV PATH=/opt/cloze/bin:$PATH \
    CLOZE_HOST=0.0.0.0 \
    CLOZE_MODEL_STORE=/bundles
# A number, so that Kubernetes can tell that it is not root; it owns nothing and needs no entry in /etc/passwd.
USER 10001:10001
EXPOSE 8000
# Without the proxy that a container may inherit: loopback is not behind it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/readyz', timeout=4)"]
# No shell in between: SIGTERM reaches the server, which drains.
ENTRYPOINT ["cloze"]
CMD ["serve"]
