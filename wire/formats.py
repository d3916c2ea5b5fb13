"""The `format`s of JSON schemas that answers are held to, as expressions for the whole text. Data only.

Each allows the usual spellings of its format and no others: date-time, time, date, duration and uuid as their RFCs say,
email addresses of any length, without quotes or numeric hosts, host names of up to four labels, URIs
without IPv6 hosts.
"""

_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_WORD = r"[0-9A-Fa-f]{1,4}"
_END = rf"(?:{_WORD}:{_WORD}|{_IPV4})"  # the last four bytes of IPv6
_IPV6 = "|".join(
    [rf"(?:{_WORD}:){{6}}{_END}", rf"::(?:{_WORD}:){{0,5}}{_END}", rf"::{_WORD}", "::"]
    + [rf"{_WORD}(?::{_WORD}){{0,{n}}}::(?:(?:{_WORD}:){{0,{4 - n}}}{_END}|{_WORD})?" for n in range(5)]
    + [rf"{_WORD}(?::{_WORD}){{5}}::{_WORD}", rf"{_WORD}(?::{_WORD}){{5,6}}::"]
)
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])"
_DATE = rf"(?:\d{{4}}-(?:{_DAY})|{_LEAP_YEAR}-02-29)"
_HOUR = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"(?:{_HOUR}:[0-5]\d(?:\.\d{{1,9}})?(?:Z|[+-]{_HOUR})|23:59:60(?:\.\d{{1,9}})?Z)"
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_LABEL = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}"  # 61 characters at most, and none of the reserved ones with "--"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOMS = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_NAME_PART = r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_HEX = "%[0-9A-Fa-f]{2}"
_PART = rf"(?:[\w.~!$&'()*+,;=:@-]|{_HEX})"  # of a path
_PATH = rf"(?:/{_PART}*)*"
_AUTHORITY = rf"//(?:(?:[\w.~!$&'()*+,;=:-]|{_HEX})*@)?(?:[\w.~!$&'()*+,;=-]|{_HEX})*(?::\d*)?{_PATH}"
_ROOTED = rf"/(?:{_PART}+{_PATH})?"
_BEHIND = rf"(?:\?(?:{_PART}|[/?])*)?(?:#(?:{_PART}|[/?])*)?"
_NAME = rf"(?:\w|{_HEX})(?:\.?(?:\w|{_HEX}))*(?::[1-9]\d{{0,3}}|\*)?"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"

FORMATS = {
    "date-time": rf"{_DATE}T{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "duration": rf"P(?:(?:\d+D|\d+M(?:\d+D)?|\d+Y(?:\d+M(?:\d+D)?)?)(?:{_CLOCK})?|{_CLOCK}|\d+W)",
    "email": rf"{_ATOMS}(?:\.{_ATOMS})*@{_NAME_PART}(?:\.{_NAME_PART})*",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_ROOTED}|{_PART}+{_PATH}|){_BEHIND}",
    "uri-reference": rf"(?:{_AUTHORITY}|{_ROOTED}|(?:[\w.~!$&'()*+,;=@-]|{_HEX})+{_PATH}|){_BEHIND}"
    rf"|[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_ROOTED}|{_PART}+{_PATH}|){_BEHIND}",
    "uri-template": r"(?:[\x21\x23\x24\x26\x28-\x3b=\x3f-\x5b\x5d_a-z~]"
    rf"|{_HEX}|\{{[+#./;?&=,!@|]?{_NAME}(?:,{_NAME})*\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
}
OTHER_FORMATS = frozenset(("idn-email", "idn-hostname", "iri", "iri-reference", "regex"))  # JSON Schema's; not enforced
