# Completion of PROGRAM for fish.

function __PROGRAM_complete
	set -l words (commandline -opc)
	set -l current (commandline -ct)
	for line in ($words[1] __complete $words[2..-1] "$current" 2>/dev/null)
		switch $line
			case ':files'
				__fish_complete_path "$current"
			case ':files *'
				set -l endings (string join '|' (string split ' ' -- $line)[2..-1])
				__fish_complete_path "$current" | string match -r "^[^\t]*(?:/|\.(?:$endings))(?:\t.*)?\$"
			case ':*'
			case '*'
				echo $line
		end
	end
end

complete -c PROGRAM -f -a '(__PROGRAM_complete)'
