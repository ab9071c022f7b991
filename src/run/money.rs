//! Money: whole millionths of a dollar inside, dollars in JSON and YAML.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{RefOr, Schema as ApiSchema};
use utoipa::{PartialSchema, ToSchema};

/// An amount in US dollars, exact to a millionth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Usd {
    micro: i64,
}

impl Usd {
    pub const fn from_micro(micro: i64) -> Self {
        Self { micro }
    }

    pub const fn micro(self) -> i64 {
        self.micro
    }

    /// In dollars.
    #[expect(clippy::cast_precision_loss, reason = "exact below nine billion dollars")]
    pub fn dollars(self) -> f64 {
        self.micro as f64 / 1e6
    }
}

impl fmt::Display for Usd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.dollars())
    }
}

impl Serialize for Usd {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.dollars())
    }
}

impl<'de> Deserialize<'de> for Usd {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let dollars = f64::deserialize(deserializer)?;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "what is too large stays the largest amount"
        )]
        let micro = (dollars * 1e6).round() as i64;
        Ok(Self { micro })
    }
}

impl ToSchema for Usd {}

impl PartialSchema for Usd {
    fn schema() -> RefOr<ApiSchema> {
        let object = ObjectBuilder::new().schema_type(Type::Number);
        object.description(Some("US dollars.")).examples([serde_json::json!(0.5)]).into()
    }
}

impl JsonSchema for Usd {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Usd".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "number", "minimum": 0.000_001, "maximum": 1_000_000})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dollars_are_read_to_the_millionth() {
        let table = [
            ("2.0", 2_000_000),
            ("2", 2_000_000),
            ("0.0000015", 2),
            ("0.1", 100_000),
            ("-1", -1_000_000),
        ];
        for (text, micro) in table {
            assert_eq!(serde_json::from_str::<Usd>(text).unwrap().micro(), micro, "{text}");
        }
        assert_eq!(serde_json::from_str::<Usd>("1e300").unwrap().micro(), i64::MAX);
        assert_eq!(serde_json::to_string(&Usd::from_micro(540)).unwrap(), "0.00054");
        assert_eq!(Usd::from_micro(1_500_000).to_string(), "1.5");
    }
}
