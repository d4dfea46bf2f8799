# A custom container of KServe, for `inference-service.yaml`. It was neither built nor run.
#   docker build -t REGISTRY/rlx-ort-serve -f examples/serving/kserve.Dockerfile examples/serving
# KServe puts what storageUri names under /mnt/models and asks for the protocol at port 8080. Its gateway checks who asks
# and speaks TLS, so there is no token here.
FROM python:3.12-slim

RUN pip install --no-cache-dir "rlx_ort[cpu,serve,otel]" && useradd --create-home --uid 1000 served
USER 1000
ENV RLX_CACHE_DIR=/tmp/rlx_ort
EXPOSE 8080
ENTRYPOINT ["rlx-ort", "serve", "--host", "0.0.0.0", "--http", "8080", "--grpc", "-1"]
CMD ["/mnt/models"]
