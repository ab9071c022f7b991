# The digests are of the index of all platforms; `docker buildx imagetools inspect <image>` tells a newer one.
FROM rust:1.95-bookworm@sha256:6258907abe69656e41cd992e0b705cdcfabcbbe3db374f92ed2d47121282d4a1 AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY src src
COPY migrations migrations
# The commit that is built, for the metric toolloop_build_info: --build-arg REVISION=$(git rev-parse HEAD)
ARG REVISION=unknown
ENV TOOLLOOP_REVISION=$REVISION
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked && cp target/release/toolloop /usr/local/bin/toolloop

FROM debian:bookworm-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251
# For the tool `browser`, add chromium to the packages.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl python3 \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home --uid 10001 toolloop
COPY --from=build /usr/local/bin/toolloop /usr/local/bin/toolloop
WORKDIR /home/toolloop
# Definitions belong to root: the service, and what its tools do, cannot change them.
COPY agents agents
COPY scenarios scenarios
COPY skills skills
# The image has Python and a shell, and no Node.js: of the tools that are programs that one is left out.
COPY tools/files.yaml tools/largest_files.sh tools/text.yaml tools/word_count.py tools/
# All that the service writes. Volumes begin with the directories, and their owners, that they are mounted on: without
# `default`, Docker makes it as root where a directory is mounted in it.
RUN mkdir -p data workspace/default && chown root:root . \
    && chown toolloop data workspace workspace/default && chmod 700 data workspace workspace/default
USER toolloop
ENV TOOLLOOP_SERVER__LISTEN=0.0.0.0:8080 \
    DATABASE_URL=sqlite:///home/toolloop/data/toolloop.db
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s CMD curl -fsS http://127.0.0.1:8080/healthz
ENTRYPOINT ["toolloop"]
CMD ["serve"]
