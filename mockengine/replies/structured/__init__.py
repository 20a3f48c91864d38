# SPDX-License-Identifier: Apache-2.0
"""Replies that keep to a constraint: JSON, a JSON schema, a regex, a choice, a grammar, structural tags.

What a client asks for is read (`constraint`), made smaller where that leaves it satisfiable (`schema`), and written as
one grammar in llguidance's dialect of Lark (`lark`, `tags`, `grammar`). llguidance says at every position which tokens
may follow; `writer` picks one of them, by what they look like (`vocabulary`), as a pure function of key and position.
"""
