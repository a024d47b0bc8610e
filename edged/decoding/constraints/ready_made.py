"""Ready-made grammars, by the names that requests use."""

from __future__ import annotations

from edged.decoding.constraints.base import lark_grammar, schema_grammar

# One SELECT statement of the SQL that SQLite, PostgreSQL and DuckDB share, on one line. Names may be any but the words
# that end a clause; a name in double quotes may be any at all.
_SQL_SELECT = r"""
start: query
query: select (_SP SET_OPERATOR _SP select)* order? limit?
select: "SELECT " ("DISTINCT ")? columns " FROM " sources where? group?
columns: "*" | column (", " column)*
column: expression (" AS " NAME)? | NAME ".*"
sources: source (join | ", " source)*
source: table (" AS " NAME)? | "(" query ") AS " NAME
table: NAME ("." NAME)?
join: " " ("INNER " | "LEFT " | "CROSS ")? "JOIN " source (" ON " condition)?
where: " WHERE " condition
group: " GROUP BY " expression (", " expression)* (" HAVING " condition)?
order: " ORDER BY " ordering (", " ordering)*
ordering: expression (" ASC" | " DESC")?
limit: " LIMIT " INTEGER (" OFFSET " INTEGER)?
condition: conjunction (" OR " conjunction)*
conjunction: negation (" AND " negation)*
negation: ("NOT ")? predicate
predicate: expression _SP COMPARISON _SP expression
         | expression (" NOT")? " IN (" (expression (", " expression)* | query) ")"
         | expression (" NOT")? " BETWEEN " expression " AND " expression
         | expression (" NOT")? " LIKE " STRING
         | expression " IS" (" NOT")? " NULL"
         | "EXISTS (" query ")"
         | "(" condition ")"
expression: term (_SP ADDING _SP term)*
term: factor (_SP MULTIPLYING _SP factor)*
factor: literal | table | function | "(" expression ")" | case
function: FUNCTION "(" (("DISTINCT ")? expression (", " expression)*)? ")" | "COUNT(*)"
case: "CASE" (" WHEN " condition " THEN " expression)+ (" ELSE " expression)? " END"
literal: NUMBER | STRING | "NULL"
_SP: " "
SET_OPERATOR: "UNION ALL" | "UNION" | "INTERSECT" | "EXCEPT"
COMPARISON: "=" | "<>" | "!=" | "<=" | ">=" | "<" | ">"
ADDING: "+" | "-" | "||"
MULTIPLYING: "*" | "/" | "%"
FUNCTION: "COUNT" | "SUM" | "AVG" | "MIN" | "MAX" | "ABS" | "ROUND" | "LOWER" | "UPPER" | "LENGTH" | "COALESCE" | "SUBSTR"
        | "TRIM"
NAME: (/[a-z_][a-z0-9_]{0,40}/ & ~RESERVED) | /"[^"\x00-\x1f]{1,40}"/
RESERVED: /all|and|as|asc|between|by|case|cross|desc|distinct|else|end|except|exists|from|group|having|in|inner|intersect/
        | /is|join|left|like|limit|not|null|offset|on|or|order|select|then|union|values|when|where|natural|right|full/
        | /outer|using|window|set|table|index|collate|isnull|notnull|glob|match|regexp|escape|cast|create|delete|insert/
        | /update|drop|alter|into|primary|foreign|references|default|check|constraint|unique|transaction|commit|add|to/
        | /returning|raise|if|begin|rollback|over|filter|nothing|deferrable|autoincrement/
STRING: /'([^'\x00-\x1f]|''){0,200}'/
NUMBER: /[0-9]{1,18}(\.[0-9]{1,9})?/
INTEGER: /[0-9]{1,9}/
"""


def _grammars() -> dict[str, str]:
    return {
        "json": schema_grammar({"anyOf": [{"type": "object"}, {"type": "array"}]}),
        "sql-select": lark_grammar(_SQL_SELECT),
    }


READY_MADE_GRAMMARS = _grammars()
"""In llguidance's own form."""
