"""Taking answers apart as they come: thoughts, tool calls and text, in the formats that models write."""
