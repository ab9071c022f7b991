//! Delimiters by which a text poses as another part of the conversation, or as a tool call.
//!
//! They are looked for in lower case. A mark weighs as much as a phrase; see [`super::phrases`].

use std::sync::LazyLock;

use crate::bounds::pattern::Patterns;
use crate::event::InjectionKind as Kind;

/// Marks with what they pose as and their weight.
pub(super) const MARKS: &[(Kind, u8, &str)] = &[
    // Tokens of chat templates.
    (
        Kind::RoleMarker,
        3,
        r"<[|｜]\s?(?:im_start|im_end|im_sep|system|user|assistant|developer|endoftext|eot_id|eom_id|start_header_id|end_header_id|begin_of_text|end_of_text|begin▁of▁sentence|end▁of▁sentence|channel|message|return|call|start|end|python_tag|tool|tool_call|recipient|endofprompt|fim_prefix)\s?[|｜]>",
    ),
    (
        Kind::RoleMarker,
        3,
        r"<(?:start|end)_of_turn>|<</?sys>>|\[/?inst\]|\[/?(?:system_prompt|available_tools|tool_results|tool_calls)\]",
    ),
    (
        Kind::RoleMarker,
        3,
        r"[<(\[{]/?(?:system|developer|admin)[_ -](?:message|prompt|instructions?|reminder|override|note|update)[>)\]}]",
    ),
    (
        Kind::RoleMarker,
        2,
        r"(?m)(?:^|[\x22'>])[\s>*_-]*#{2,}\s*(?:system|developer|assistant|new instructions?|instructions?)\s*(?:prompt|message|instructions?)?\s*:",
    ),
    (
        Kind::RoleMarker,
        2,
        r"(?m)(?:^|[\x22'>])\s*(?:system|developer)\s*(?:prompt|message|instructions?|override|note|alert)\s*:",
    ),
    (
        Kind::RoleMarker,
        1,
        r"(?m)^[\s\[(<*#]*(?:system|developer|assistant|ai|human|user)[\])>*]*\s*:\s",
    ),
    (Kind::RoleMarker, 2, r"(?m)^(?:human|user)\s*:[^\n]*\n\s*assistant\s*:"),
    (Kind::RoleMarker, 2, r"</?(?:system|admin|developer|assistant)>"),
    (
        Kind::RoleMarker,
        1,
        r"</?(?:information|important|instructions?|prompt|priority|urgent|task|secret)>",
    ),
    (Kind::RoleMarker, 1, r#""role"\s*:\s*"(?:system|assistant|developer|tool)""#),
    (
        Kind::RoleMarker,
        1,
        r"(?:begin|start|end)\s+(?:of\s+)?(?:system|user|new|hidden)\s+(?:prompt|message|input|instructions?)",
    ),
    // Tool calls.
    (
        Kind::ToolCall,
        3,
        r#"</?(?:tool_calls?|function_calls?|tool_code|tool_use|invoke|antml:[a-z_]+|tool_response|tool_results?|function_results?)(?:\s+name="[^"]*")?>|<function=[a-z_]"#,
    ),
    (Kind::ToolCall, 2, r#""(?:tool_calls|function_call)"\s*:\s*[\[{]"#),
    (
        Kind::ToolCall,
        2,
        r#""(?:name|tool|function)"\s*:\s*"[a-z0-9_.:/-]+"\s*,\s*"(?:arguments|parameters|args|tool_input)"\s*:\s*[{"]"#,
    ),
    (Kind::ToolCall, 3, r"(?m)^\s*action\s*:\s*[a-z0-9_.:/-]+\s*$\s*^\s*action input\s*:"),
    // An image whose address would carry something away.
    (Kind::Exfiltration, 2, r"!\[[^\]\n]*\]\(https?://[^)\s]*[?&/=](?:\{|\[|<|%7b|\$|data=|q=)"),
    (Kind::Impersonation, 1, r"important\s?!{2,}|!{3,}\s*important"),
    // Other writing systems, without gaps between words.
    (
        Kind::Override,
        3,
        r"(?:忽略|无视|無視|忘记|忘記|不要理会).{0,12}(?:之前|以上|先前|前面|上述|所有|原来).{0,8}(?:指令|指示|提示|命令|说明|規則|规则|要求)",
    ),
    (
        Kind::Override,
        3,
        r"(?:以前|これまで|上記|前|すべて|全て).{0,8}(?:指示|命令|プロンプト|指令|ルール).{0,8}(?:無視|忘れ|従わな)",
    ),
    (
        Kind::Override,
        3,
        r"(?:이전|위의|모든|앞의|기존).{0,8}(?:지시|명령|프롬프트|지침).{0,8}(?:무시|잊)",
    ),
    (Kind::Override, 3, r"(?:تجاهل|انس|أهمل).{0,24}(?:التعليمات|الأوامر|التوجيهات|تعليمات)"),
    (
        Kind::Override,
        3,
        r"(?:पिछले|पूर्व|सभी|ऊपर).{0,40}(?:निर्देश|आदेश).{0,24}(?:अनदेखा|नज़रअंदाज|भूल|उपेक्षा)",
    ),
    (Kind::Override, 3, r"(?:התעלם|תתעלם|שכח).{0,24}(?:ההוראות|הוראות|ההנחיות)"),
    (
        Kind::Impersonation,
        2,
        r"(?:不要|别|請勿|勿)(?:告诉|告訴|通知|提及).{0,4}(?:用户|用戶|使用者)|(?:ユーザー|利用者)に.{0,8}(?:伝え|知らせ|言わ)ない",
    ),
    (
        Kind::Exfiltration,
        2,
        r"(?:发送|傳送|发给|上传|转发).{0,20}(?:密码|密碼|密钥|凭据|令牌|机密).{0,20}(?:http|@)",
    ),
];

static PATTERNS: LazyLock<Option<Patterns>> =
    LazyLock::new(|| Patterns::compile(MARKS.iter().map(|(.., pattern)| *pattern)).ok());

/// A mark that was found.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    pub(super) kind: Kind,
    pub(super) weight: u8,
    /// Its place in the list.
    pub(super) rule: usize,
    /// Where it begins in the text.
    pub(super) at: usize,
}

/// The marks in a text of lower case.
pub(super) fn marks_in(text: &str) -> Vec<Mark> {
    let Some(patterns) = PATTERNS.as_ref() else { return Vec::new() };
    let found = patterns.found_in(text);
    let mark = |(rule, at): (usize, usize)| {
        let (kind, weight, _) = MARKS.get(rule)?;
        Some(Mark { kind: *kind, weight: *weight, rule, at })
    };
    found.filter_map(mark).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_marks_compile() {
        assert!(super::PATTERNS.is_some());
    }
}
