# A custom container of KServe, for `inference-service.yaml`. It was neither built nor run. It adds to the container of
# `Dockerfile`, which is built first; from the root of the repository:
#   docker build -t served -f examples/serving/Dockerfile .
#   docker build -t REGISTRY/rlx-ort-serve -f examples/serving/kserve.Dockerfile .
# KServe puts what storageUri names under /mnt/models and asks for the protocol at port 8080. Its gateway checks who asks
# and speaks TLS, so there is no token here.
FROM served

HEALTHCHECK NONE
EXPOSE 8080
ENTRYPOINT ["rlx-ort", "serve", "--host", "0.0.0.0", "--http", "8080", "--grpc", "-1"]
CMD ["/mnt/models"]
