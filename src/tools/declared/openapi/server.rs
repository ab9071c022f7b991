//! Where the operations of an API are: a document names an address, or a path on its own host.

use url::Url;

/// What a document says of its server.
#[derive(Debug, PartialEq, Eq)]
pub enum Server {
    /// The whole address.
    Address(String),
    /// The path alone, without a slash at its end.
    Path(String),
    /// Nothing that can be used as it is.
    Unknown,
}

impl Server {
    pub(super) fn of(url: Option<&str>) -> Self {
        let Some(url) = url.filter(|url| !url.contains(['{', '?', '#'])) else {
            return Self::Unknown;
        };
        if url.starts_with("http://") || url.starts_with("https://") {
            return Self::Address(url.to_owned());
        }
        Self::path(url).map_or(Self::Unknown, Self::Path)
    }

    fn path(url: &str) -> Option<String> {
        let anywhere = Url::parse("https://host.invalid/").ok()?;
        let meant = anywhere.join(url).ok().filter(|meant| meant.origin() == anywhere.origin())?;
        let path = meant.path().trim_end_matches('/');
        (!path.is_empty()).then(|| path.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_addresses_and_paths() {
        let address = |url: &str| Server::Address(url.to_owned());
        let path = |path: &str| Server::Path(path.to_owned());
        for (url, expected) in [
            ("https://api.example.com/v2", address("https://api.example.com/v2")),
            ("http://api.example.com", address("http://api.example.com")),
            ("/v1", path("/v1")),
            ("/api/v1/", path("/api/v1")),
            ("v1", path("/v1")),
            ("./v1", path("/v1")),
            ("../v1", path("/v1")),
            ("http-api/v1", path("/http-api/v1")),
            ("/a b\nc: d", path("/a%20bc:%20d")),
            ("/", Server::Unknown),
            ("", Server::Unknown),
            ("//api.example.com/v1", Server::Unknown),
            ("ftp://api.example.com/v1", Server::Unknown),
            ("/v{version}", Server::Unknown),
            ("https://{region}.example.com", Server::Unknown),
        ] {
            assert_eq!(Server::of(Some(url)), expected, "{url:?}");
        }
        assert_eq!(Server::of(None), Server::Unknown);
    }
}
