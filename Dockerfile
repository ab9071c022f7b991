FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY src src
COPY migrations migrations
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --profile dist --locked && cp target/dist/toolloop /usr/local/bin/toolloop

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home --uid 10001 toolloop
COPY --from=build /usr/local/bin/toolloop /usr/local/bin/toolloop
WORKDIR /home/toolloop
COPY --chown=toolloop agents agents
COPY --chown=toolloop scenarios scenarios
COPY --chown=toolloop skills skills
# The image has neither Python nor Node.js: of the tools that are programs only the shell script works in it.
COPY --chown=toolloop tools/files.yaml tools/largest_files.sh tools/
COPY --chown=toolloop workspace workspace
RUN chown toolloop /home/toolloop
USER toolloop
ENV TOOLLOOP_SERVER__LISTEN=0.0.0.0:8080
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s CMD curl -fsS http://127.0.0.1:8080/healthz
ENTRYPOINT ["toolloop"]
CMD ["serve"]
