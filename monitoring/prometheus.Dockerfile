# Prometheus from Debian's package, with the paths and the user of the image prom/prometheus, for
# docker-compose.yml where that image cannot be pulled.
#
#   docker build --tag prometheus --file monitoring/prometheus.Dockerfile monitoring
#   PROMETHEUS_IMAGE=prometheus docker compose up
ARG BASE_IMAGE=debian:12-slim
FROM ${BASE_IMAGE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends prometheus \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir /prometheus \
    && chown nobody:nogroup /prometheus
USER nobody
EXPOSE 9090
ENTRYPOINT ["prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
